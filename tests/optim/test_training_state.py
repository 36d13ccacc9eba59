"""The state for `torch.distributed.checkpoint`, in one process; shards are tested elsewhere."""

import copy

import pytest
import torch
from nets import ConvNet, closure_for, images
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.optim import SGD, AdamW, NAdam

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
    kept, loaded = optimizer._sampler._masks, other._sampler._masks
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


class Partly(nn.Module):
    """A scalar first, and a part that no gradient reaches at first."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.used = nn.Linear(4, 4)
        self.later = nn.Linear(4, 4)

    def forward(self, x, *, later):
        x = self.scale * self.used(x)
        return self.later(x) if later else x


def steps(model, optimizer, later):
    for seed, also in enumerate(later):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))

        def closure(x=x, also=also):
            optimizer.zero_grad()
            loss = model(x, later=also).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is")
@pytest.mark.parametrize("base", [AdamW, NAdam], ids=lambda base: base.__name__)
@pytest.mark.parametrize("before", [(), (False, False)], ids=["fresh", "partly"])
def test_parameters_without_a_gradient_yet_begin_afresh_after_loading(tmp_path, base, before):
    def build():
        torch.manual_seed(0)
        model = Partly()
        return model, CrAM(model, base(model.parameters(), lr=0.01), "global:0.5")

    model, optimizer = build()
    steps(model, optimizer, before)
    dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=tmp_path)
    steps(model, optimizer, (True, True))  # saving has changed nothing
    whole, alone = build()
    steps(whole, alone, before)
    steps(whole, alone, (True, True))
    again, other = build()
    dcp.load({"training": TrainingState(again, other)}, checkpoint_id=tmp_path)
    steps(again, other, (True, True))
    for name, expected in whole.state_dict().items():
        assert torch.equal(model.state_dict()[name], expected), name
        assert torch.equal(again.state_dict()[name], expected), name
