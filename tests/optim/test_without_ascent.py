"""Without rho, CrAM and CrAM+ take no ascent step; SAM and C-SAM take theirs."""

import pytest
import torch
from nets import closure_for
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK_PLUS, CrAM


def batch_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, torch.randint(4, (16,), generator=generator)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


def values(model):
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def points(groups_of, **options):
    """Returns w and w~ by name."""
    model, batch = net(), batch_of()
    optimizer = CrAM(
        model, torch.optim.SGD(groups_of(model), lr=0.0), ["global:0.5"], rule=CRAM_PLUS, **options
    )
    before = values(model)
    cross_entropy(model(batch[0]), batch[1]).backward()
    with optimizer.compressed():
        moved = values(model)
        cross_entropy(model(batch[0]), batch[1]).backward()
    return before, moved


def train(rule, **options):
    model, batch = net(), batch_of()
    base = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    optimizer = CrAM(model, base, ["global:0.5", "global:0.8"], rule=rule, **options)
    losses = [optimizer.step(closure_for(model, optimizer, batch)).item() for _ in range(30)]
    return values(model), losses


@pytest.mark.parametrize("options", [{}, {"rho": None}, {"rho": 0.0}], ids=str)
def test_cram_plus_without_rho_is_top_k_plus(options):
    trained, losses = train(CRAM_PLUS, **options)
    expected, _ = train(TOPK_PLUS)
    for name, value in expected.items():
        assert torch.equal(trained[name], value)
    assert losses[-1] < losses[0] / 2


def test_the_rules_that_are_an_ascent_have_a_rho():
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    assert CrAM(model, base, [], rule=SAM).rho == 0.05
    assert CrAM(model, base, ["global:0.5"], rule=C_SAM).rho == 0.05
    assert CrAM(model, base, ["global:0.5"], rule=CRAM).rho == 0


def test_only_compressible_weights_leave_w():
    before, moved = points(lambda model: model.parameters())
    for name, value in before.items():
        kept = moved[name] != 0
        assert torch.equal(moved[name][kept], value[kept])
        assert bool(kept.all()) == name.endswith("bias")


def test_a_group_may_have_a_rho_of_its_own():
    def groups_of(model):
        return [{"params": model[0].parameters(), "rho": 0.1}, {"params": model[2].parameters()}]

    before, moved = points(groups_of)
    assert not torch.equal(before["0.bias"], moved["0.bias"])
    assert torch.equal(before["2.bias"], moved["2.bias"])


def test_a_bound_of_the_norm_has_no_effect_and_is_refused():
    model = net()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"max_ascent_norm=1\.0 has no effect: rho is 0"):
        CrAM(model, base, "global:0.5", max_ascent_norm=1.0)
    base = torch.optim.SGD([{"params": model.parameters(), "rho": 0.1}], lr=0.1)
    CrAM(model, base, "global:0.5", max_ascent_norm=1.0)
