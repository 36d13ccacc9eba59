"""The state for `torch.distributed.checkpoint`, in one process; shards are tested elsewhere."""

import copy

import pytest
import torch
from nets import ConvNet, closure_for, images
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CrAM
from torchcram.optim.checkpoint import TrainingState

pytestmark = pytest.mark.filterwarnings("ignore:.*(leaves dense|one scale per output)")
OPERATORS = [f"global:0.{level}" for level in range(1, 10)] + ["nm:2:4", "int4"]


def build(base=AdamW, seed=3):
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = CrAM(
        model,
        base(model.parameters(), lr=0.01),
        OPERATORS,
        rule=C_SAM,
        mask_interval=5,
        seed=seed,
    )
    return model, optimizer


def train(model, optimizer, steps):
    for _ in range(steps):
        optimizer.step(closure_for(model, optimizer, images()))


@pytest.mark.parametrize("base", [SGD, AdamW])
def test_many_masks_come_back(base):
    model, optimizer = build(base)
    train(model, optimizer, 12)
    state = copy.deepcopy(TrainingState(model, optimizer).state_dict())
    assert list(state["masks"]) == ["0", "8", "16"]  # 22 masks of each weight, in three bytes
    again, other = build(base, seed=8)
    TrainingState(again, other).load_state_dict(state)
    kept, loaded = optimizer._draws._masks, other._draws._masks
    assert len(kept) > 8
    assert kept.keys() == loaded.keys()
    for slot, masks in kept.items():
        assert all(torch.equal(mask, loaded[slot][name]) for name, mask in masks.items()), slot
    torch.manual_seed(1)
    train(model, optimizer, 4)
    torch.manual_seed(1)
    train(again, other, 4)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_parameters_without_a_gradient_begin_at_zero():
    model, optimizer = build()
    train(model, optimizer, 2)
    states = TrainingState(model, optimizer).state_dict()["optimizer"]["state"]
    assert states.keys() == dict(model.named_parameters()).keys()
    assert all(not value.any() for value in states["unused.weight"].values())
    assert states["unused.weight"]["exp_avg"].shape == model.unused.weight.shape
    assert states["unused.weight"]["step"].shape == ()
