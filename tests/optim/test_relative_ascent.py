"""The ascent without rho: by a part of the length of every parameter."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nets import closure_for, mlp
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import SAM, CrAM
from torchcram.optim.cram import RELATIVE_ASCENT

scales = st.sampled_from([2.0**-10, 2.0**-3, 2.0**4, 2.0**12])  # which round nothing


def point(model, batch, *, loss_scale=1.0, grad_scaler=None, **options):
    """Returns w, and w~ without compression, by name."""
    optimizer = CrAM(model, torch.optim.SGD(model.parameters(), lr=0.0), None, rule=SAM, **options)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    loss = cross_entropy(model(batch[0]), batch[1]) * loss_scale
    loss.backward()
    with optimizer.compressed(grad_scaler=grad_scaler):
        moved = {name: value.detach().clone() for name, value in model.named_parameters()}
        cross_entropy(model(batch[0]), batch[1]).backward()
    return before, moved


def batch_of(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, torch.randint(4, (16,), generator=generator)


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4))


@given(st.integers(0, 10))
def test_every_parameter_moves_by_its_part(seed):
    before, moved = point(net(seed), batch_of(seed), rho=None)
    for name, value in before.items():
        length = (moved[name] - value).norm() / value.norm()
        assert length == pytest.approx(RELATIVE_ASCENT, rel=1e-3)


@given(scales)
def test_the_scale_of_the_loss_does_not_matter(scale):
    _, expected = point(net(), batch_of(), rho=None)
    _, moved = point(net(), batch_of(), rho=None, loss_scale=scale)
    for name, value in expected.items():
        torch.testing.assert_close(moved[name], value)


@given(scales)
def test_the_scale_of_the_weights_does_not_matter(scale):
    _, expected = point(net(), batch_of(), rho=None)
    model = net()
    with torch.no_grad():  # the same function: ReLU lets a positive factor through
        model[0].weight.mul_(scale)
        model[0].bias.mul_(scale)
        model[2].weight.div_(scale)
    _, moved = point(model, batch_of(), rho=None)
    factors = {"0.weight": scale, "0.bias": scale, "2.weight": 1 / scale, "2.bias": 1}
    for name, value in expected.items():
        torch.testing.assert_close(moved[name], value * factors[name])


def test_a_parameter_of_zeros_and_one_without_gradient_stay():
    model = net()
    with torch.no_grad():
        model[0].bias.zero_()
        model[2].weight[:, 0] = 0
    model.unused = nn.Parameter(torch.ones(3))
    before, moved = point(model, batch_of(), rho=None)
    for name in ("0.bias", "unused"):
        assert torch.equal(before[name], moved[name])
    assert not torch.equal(before["2.weight"], moved["2.weight"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    model, (inputs, labels) = net().to(dtype), batch_of()
    before, moved = point(model, (inputs.to(dtype), labels), rho=None)
    for name, value in before.items():
        length = (moved[name] - value).double().norm() / value.double().norm()
        assert length == pytest.approx(
            RELATIVE_ASCENT, rel=0.5 if dtype is torch.bfloat16 else 1e-6
        )


def test_groups_may_have_a_rho_of_their_own():
    model, batch = net(), batch_of()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "rho": 0.0}]
    optimizer = CrAM(model, torch.optim.SGD(groups, lr=0.0), None, rule=SAM, rho=None)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    cross_entropy(model(batch[0]), batch[1]).backward()
    with optimizer.compressed():
        moved = {name: value.detach().clone() for name, value in model.named_parameters()}
        cross_entropy(model(batch[0]), batch[1]).backward()
    assert not torch.equal(before["0.weight"], moved["0.weight"])
    assert torch.equal(before["2.weight"], moved["2.weight"])


def test_a_bound_of_the_norm_has_no_effect_and_is_refused():
    model = mlp()
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"max_ascent_norm=1\.0 has no effect with rho=None"):
        CrAM(model, base, "global:0.5", rho=None, max_ascent_norm=1.0)


def test_the_loss_falls():
    model, data = net(), batch_of()
    optimizer = CrAM(model, torch.optim.SGD(model.parameters(), lr=0.2), "global:0.5", rho=None)
    losses = [optimizer.step(closure_for(model, optimizer, data)).item() for _ in range(40)]
    assert losses[-1] < losses[0] / 2
