"""Save, load, continue equals never having stopped, bit for bit."""

import io

import pytest
import torch
from nets import RULES, ConvNet, closure_for, images, same, snapshot
from torch.optim import SGD, AdamW

from torchcram import Chain, CrAM, GlobalTopK, Quantize, UniformTopK
from torchcram.optim.sampler import pack_bits, unpack_bits

OPERATORS = [
    GlobalTopK(0.5),
    GlobalTopK((0.3, 0.9)),
    Quantize(4),
    Chain(UniformTopK(0.7), Quantize(8)),
]


def build(kind, rule, tau):
    torch.manual_seed(1)
    model = ConvNet()
    extra = {"momentum": 0.9} if kind is SGD else {}
    base = kind(model.parameters(), lr=0.05, weight_decay=0.01, **extra)
    optimizer = CrAM(
        model,
        base,
        OPERATORS,
        rule=rule,
        rho=0.1,
        mask_interval=tau,
        base_step_probability=0.2,
    )
    return model, optimizer


@pytest.mark.parametrize("tau", [1, 3])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_resuming_is_exact(rule, kind, tau):
    batches = [images() for _ in range(14)]
    model, optimizer = build(kind, rule, tau)
    file = io.BytesIO()
    for number, batch in enumerate(batches):
        if number == 8:
            torch.save([model.state_dict(), optimizer.state_dict()], file)
        optimizer.step(closure_for(model, optimizer, batch))
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    other, resumed = build(kind, rule, tau)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    for batch in batches[8:]:
        resumed.step(closure_for(other, resumed, batch))
    assert same(snapshot(model), snapshot(other))


def test_the_state_is_that_of_the_base_and_of_the_draws():
    model, optimizer = build(SGD, RULES[2], 1)
    optimizer.step(closure_for(model, optimizer, images()))
    state = optimizer.state_dict()
    assert state.keys() == {"state", "param_groups", "cram"}
    assert state["cram"].keys() == {"generator", "uses", "masks", "weights"}
    assert state["cram"]["masks"] == []  # scratch is not saved
    assert all(entry.keys() == {"momentum_buffer"} for entry in optimizer.base.state.values())
    assert optimizer.state is optimizer.base.state
    assert optimizer.param_groups is optimizer.base.param_groups


def test_groups_stay_shared_after_loading():
    _, optimizer = build(SGD, RULES[2], 1)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.123
    assert optimizer.base.param_groups[0]["lr"] == 0.123


def test_the_state_of_a_bare_base_optimizer_can_be_continued():
    model = ConvNet()
    base = SGD(model.parameters(), lr=0.3, momentum=0.9)
    closure_for(model, base, images())()
    base.step()
    saved = base.state_dict()
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), GlobalTopK(0.5), rho=0.2)
    optimizer.load_state_dict(saved)
    assert optimizer.rho == 0.2
    assert optimizer.param_groups[0]["lr"] == 0.3
    optimizer.step(closure_for(model, optimizer, images()))


def test_other_operators_may_take_over():
    model, optimizer = build(SGD, RULES[2], 3)
    for _ in range(6):
        optimizer.step(closure_for(model, optimizer, images()))
    other = CrAM(model, SGD(model.parameters(), lr=0.1), [GlobalTopK(0.5), GlobalTopK(0.99)])
    uses = optimizer.state_dict()["cram"]["uses"]
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["cram"]["uses"] == {
        name: count for name, count in uses.items() if name == "global:0.5"
    }
    other.step(closure_for(model, other, images()))
    assert other.operator in (GlobalTopK(0.5), GlobalTopK(0.99))


@pytest.mark.parametrize("shape", [(1,), (8,), (3, 5), (16, 4, 3, 3)])
def test_masks_pack_into_bits(shape):
    mask = torch.rand(shape) > 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert packed.numel() == -(-mask.numel() // 8)
    assert torch.equal(unpack_bits(packed, mask), mask)
