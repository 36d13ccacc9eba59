"""Steps captured as CUDA graphs do what steps one kernel at a time do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM_PLUS, SAM, CrAM
from torchcram.optim.graphs import GraphedStep

pytestmark = pytest.mark.gpu

BASES = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True),
    "AdamW": lambda p: AdamW(p, lr=0.01, fused=True),
}
CRAMS = {
    "plain": None,
    "SAM": {"operators": (), "rule": SAM},
    "CrAM+": {"operators": ("global:0.5", "global:0.9", "nm:2:4", "int4"), "rule": CRAM_PLUS},
    "C-SAM": {"operators": ("global:0.5", "uniform:0.8"), "rule": C_SAM},
    "interval": {"operators": ("global:0.5", "global:0.9"), "mask_interval": 3},
    "sometimes plain": {"operators": "global:0.7", "base_step_probability": 0.4},
}


class Training:
    """A small net, all of its batches on the device, and a step that finds the next one there."""

    def __init__(self, base, cram):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        )
        self.model.cuda()
        self.optimizer = BASES[base](self.model.parameters())
        if cram is not None:
            options = copy.copy(cram)
            operators = options.pop("operators")
            self.optimizer = CrAM(self.model, self.optimizer, operators, **options)
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(8, 32, 16, generator=generator).cuda()
        self.labels = torch.randint(4, (8, 32), generator=generator).cuda()
        self.number = torch.zeros((), dtype=torch.int64, device="cuda")

    def step(self):
        inputs = self.inputs.index_select(0, self.number.view(1))[0]
        labels = self.labels.index_select(0, self.number.view(1))[0]

        def closure():
            self.optimizer.zero_grad()
            loss = cross_entropy(self.model(inputs), labels)
            loss.backward()
            return loss.detach()

        self.optimizer.step(closure)
        self.number.add_(1).remainder_(8)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", CRAMS)
def test_the_same_weights_and_the_same_draws(base, kind):
    eager, graphed = Training(base, CRAMS[kind]), Training(base, CRAMS[kind])
    before = copy.deepcopy(graphed.model.state_dict())
    take = GraphedStep(graphed.model, graphed.optimizer, graphed.step)
    for name, value in graphed.model.state_dict().items():
        assert torch.equal(value, before[name]), name  # warming up and capturing left no trace
    graphed.number.zero_()
    for _ in range(20):
        eager.step()
        take()
    take.check()
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(graphed.model.state_dict()[name], value, rtol=1e-4, atol=1e-5)
    if kind != "plain":
        ours, theirs = (t.optimizer.state_dict()["cram"] for t in (graphed, eager))
        assert torch.equal(ours["generator"], theirs["generator"])
        assert ours["uses"] == theirs["uses"]


def test_the_learning_rate_is_read_at_every_step():
    training = Training("SGD", CRAMS["CrAM+"])
    take = GraphedStep(training.model, training.optimizer, training.step)
    training.optimizer.param_groups[0]["lr"].fill_(0)
    before = [p.detach().clone() for p in training.model.parameters()]
    take()
    assert all(torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True))
    training.optimizer.param_groups[0]["lr"].fill_(0.1)
    take()
    assert not torch.equal(next(training.model.parameters()), before[0])


def test_a_gradient_that_is_not_finite_is_left_out_and_told():
    training = Training("SGD", CRAMS["CrAM+"])
    take = GraphedStep(training.model, training.optimizer, training.step)
    take.check()
    training.inputs.fill_(torch.inf)
    before = [p.detach().clone() for p in training.model.parameters()]
    take()
    with pytest.raises(FloatingPointError, match="1 step"):
        take.check()
    assert all(torch.equal(p, q) for p, q in zip(training.model.parameters(), before, strict=True))
    take.check()


def test_what_cannot_be_captured_is_refused():
    training = Training("SGD", {"operators": "global:0.3-0.9"})
    with pytest.raises(ValueError, match="another operator at every step"):
        GraphedStep(training.model, training.optimizer, training.step)
    training = Training("SGD", None)
    base = SGD(training.model.parameters(), lr=0.1, foreach=True)
    training.optimizer = CrAM(training.model, base, "global:0.5")
    with pytest.raises(ValueError, match="fused"):
        GraphedStep(training.model, training.optimizer, training.step)
