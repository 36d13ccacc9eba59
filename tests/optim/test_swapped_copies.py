"""Steps that compute w~ in other memory than that of w, as captured steps do."""

import pytest
import torch
from nets import closure_for
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK, TOPK_PLUS, CrAM
from torchcram.optim.step_state import SwappedCopies

RULES = [SAM, CRAM, CRAM_PLUS, C_SAM, TOPK, TOPK_PLUS]
OPERATORS = ["global:0.5", "nm:2:4", "int4", "uniform:0.5+int8"]


@pytest.fixture(autouse=True)
def _enabled(monkeypatch):
    monkeypatch.setenv("TORCHCRAM_OVERLAP", "1")


def training(rule=CRAM_PLUS, operators=OPERATORS, **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4)
    ).to(memory_format=torch.channels_last)
    base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    operators = operators if rule.compresses else []
    return model, CrAM(model, base, operators, rule=rule, seed=1, **options)


def batches(count=6):
    generator = torch.Generator().manual_seed(3)
    return [
        (
            torch.randn(8, 4, 4, 4, generator=generator),
            torch.randint(4, (8,), generator=generator),
        )
        for _ in range(count)
    ]


def addresses(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"mask_interval": 2}, {"base_step_probability": 0.5}])
@pytest.mark.parametrize("rho", [None, 0.1])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_bits_are_those_of_other_steps(rule, rho, options):
    model, optimizer = training(rule, rho=rho, **options)
    expected, other = training(rule, rho=rho, **options)
    before = addresses(model)
    for batch in batches():
        with optimizer.captured():
            assert isinstance(optimizer._backup, SwappedCopies)
            optimizer.step(closure_for(model, optimizer, batch))
        other.step(closure_for(expected, other, batch))
    assert addresses(model) == before
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert str(optimizer.state_dict()["cram"]) == str(other.state_dict()["cram"])


@pytest.mark.parametrize(("rho", "early"), [(None, True), (0.1, False)])
def test_without_an_ascent_the_weights_are_compressed_before_the_first_pass(rho, early):
    model, optimizer = training(rho=rho)
    (inputs, labels), *_ = batches(1)
    order = []
    compress_ = optimizer._sampler.compress_

    def noted(*args, **options):
        order.append("compress")
        return compress_(*args, **options)

    def closure():
        order.append("pass")
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), labels)
        loss.backward()
        return loss

    optimizer._sampler.compress_ = noted
    with optimizer.captured():
        optimizer.step(closure)
    expected = ["compress", "pass", "pass"] if early else ["pass", "compress", "pass"]
    assert order == expected


@pytest.mark.parametrize("rho", [None, 0.1])
def test_an_error_at_either_point_leaves_w_in_its_memory(rho):
    model, optimizer = training(rho=rho)
    batch = batches(1)[0]
    before, values = addresses(model), [p.detach().clone() for p in model.parameters()]
    for last in (1, 2):
        calls = []

        def closure(last=last, calls=calls):
            calls.append(addresses(model))
            if len(calls) == last:
                raise KeyboardInterrupt
            return closure_for(model, optimizer, batch)()

        with pytest.raises(KeyboardInterrupt), optimizer.captured():
            optimizer.step(closure)
        assert (calls[-1] != before) == (last == 2)
        assert addresses(model) == before
        assert all(map(torch.equal, model.parameters(), values))
    optimizer.step(closure_for(model, optimizer, batch))  # goes on as if nothing had been


def test_recurrent_layers_keep_their_memory():
    model = nn.LSTM(4, 8)
    optimizer = CrAM(model, torch.optim.SGD(model.parameters(), lr=0.1), "global:0.5")
    with optimizer.captured():
        assert not isinstance(optimizer._backup, SwappedCopies)


def test_it_is_enabled_by_the_environment(monkeypatch):
    monkeypatch.delenv("TORCHCRAM_OVERLAP")
    _, optimizer = training()
    with optimizer.captured():
        assert not isinstance(optimizer._backup, SwappedCopies)
