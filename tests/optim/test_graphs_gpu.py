"""Steps captured as CUDA graphs do what steps one kernel at a time do."""

import copy
import random

import pytest
import torch
from resident import Resident
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM_PLUS, SAM, CrAM
from torchcram.optim.graphs import StepGraphs

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


def training(base, cram):
    """A training by one of `BASES` with one of `CRAMS` around it."""

    def make(model):
        optimizer = BASES[base](model.parameters())
        if cram is None:
            return optimizer
        options = {**cram}
        return CrAM(model, optimizer, options.pop("operators"), **options)

    return Resident(make)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", CRAMS)
def test_the_same_weights_and_the_same_draws(base, kind):
    eager, graphed = training(base, CRAMS[kind]), training(base, CRAMS[kind])
    before = copy.deepcopy(graphed.model.state_dict())
    take = StepGraphs(graphed.model, graphed.optimizer, graphed.step)
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
    given = training("SGD", CRAMS["CrAM+"])
    take = StepGraphs(given.model, given.optimizer, given.step)
    given.optimizer.param_groups[0]["lr"].fill_(0)
    before = [p.detach().clone() for p in given.model.parameters()]
    take()
    assert all(torch.equal(p, q) for p, q in zip(given.model.parameters(), before, strict=True))
    given.optimizer.param_groups[0]["lr"].fill_(0.1)
    take()
    assert not torch.equal(next(given.model.parameters()), before[0])


def test_a_gradient_that_is_not_finite_is_left_out_and_told():
    given = training("SGD", CRAMS["CrAM+"])
    take = StepGraphs(given.model, given.optimizer, given.step)
    take.check()
    given.inputs.fill_(torch.inf)
    before = [p.detach().clone() for p in given.model.parameters()]
    take()
    with pytest.raises(FloatingPointError, match="1 step"):
        take.check()
    assert all(torch.equal(p, q) for p, q in zip(given.model.parameters(), before, strict=True))
    take.check()


def test_what_cannot_be_captured_is_refused():
    given = training("SGD", {"operators": "global:0.3-0.9"})
    with pytest.raises(ValueError, match="another operator at every step"):
        StepGraphs(given.model, given.optimizer, given.step)
    given = training("SGD", None)
    base = SGD(given.model.parameters(), lr=0.1, foreach=True)
    given.optimizer = CrAM(given.model, base, "global:0.5")
    with pytest.raises(ValueError, match="fused"):
        StepGraphs(given.model, given.optimizer, given.step)


def test_no_host_memory_is_pinned_while_a_graph_is_captured(monkeypatch):
    pinned = []
    for name in ("tensor", "empty"):
        make = getattr(torch, name)

        def watched(*args, make=make, **kwargs):
            if kwargs.get("pin_memory") and capturing:
                pinned.append(make)
            return make(*args, **kwargs)

        monkeypatch.setattr(torch, name, watched)
    capturing = []
    enter, leave = torch.cuda.graph.__enter__, torch.cuda.graph.__exit__

    def begin(self):
        enter(self)
        capturing.append(self)

    def end(self, *args):
        capturing.clear()
        leave(self, *args)

    monkeypatch.setattr(torch.cuda.graph, "__enter__", begin)
    monkeypatch.setattr(torch.cuda.graph, "__exit__", end)
    given = training("SGD", CRAMS["CrAM+"])
    StepGraphs(given.model, given.optimizer, given.step)()
    assert not pinned


def test_a_capture_by_hand_is_refused():
    given = training("SGD", CRAMS["CrAM+"])
    for _ in range(6):
        given.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="GraphedStep, or set check_finite=False"),
        torch.cuda.graph(graph, capture_error_mode="relaxed"),
    ):
        given.step()
    torch.cuda.synchronize()


class Holder:
    """Pinned memory in a cycle, which only the garbage collector frees."""

    def __init__(self, size):
        self.memory = torch.empty(size, pin_memory=True)
        self.itself = self


@pytest.mark.slow
def test_two_hundred_captures_after_varied_allocations():
    draw, kept, captures = random.Random(0), [], 0  # noqa: S311
    streams = [torch.cuda.Stream() for _ in range(3)]
    while captures < 200:
        kind = draw.choice([kind for kind in CRAMS if kind != "plain"])
        given = training(draw.choice([*BASES]), CRAMS[kind])
        for _ in range(draw.randrange(4)):
            given.step()  # eager: pinned flags, tables in pinned memory
        for _ in range(draw.randrange(8)):
            size = draw.randrange(1, 1 << draw.randrange(1, 20))
            with torch.cuda.stream(draw.choice(streams)):
                host = torch.empty(size, pin_memory=True)
                kept.append(host.to("cuda", non_blocking=True))
            Holder(size)
        kept = kept[-draw.randrange(1, 40) :]
        take = StepGraphs(given.model, given.optimizer, given.step)
        captures += len(take._graphs)
        for _ in range(3):
            take()
        take.check()
    torch.cuda.synchronize()
