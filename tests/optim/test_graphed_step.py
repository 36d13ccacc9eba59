"""Whole steps on batches; without a GPU they are those of the loop written by hand."""

import copy
import gc
import re
import weakref
from collections import namedtuple

import pytest
import torch
from replayed import Replayed
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, RMSprop, lr_scheduler

from torchcram import C_SAM, CRAM_PLUS, SAM, CrAM, GraphedStep, split_batch
from torchcram.optim import graphed_step
from torchcram.optim.graphs import StepGraphs, _options

Pair = namedtuple("Pair", "inputs labels")
BASES = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, fused=True),
    "AdamW": lambda p: AdamW(p, lr=0.01),
}
CRAMS = {
    "plain": None,
    "SAM": {"operators": (), "rule": SAM},
    "CrAM+": {"operators": ("global:0.5", "nm:2:4", "int4"), "rule": CRAM_PLUS},
    "C-SAM": {"operators": ("global:0.5", "uniform:0.8"), "rule": C_SAM},
    "interval": {"operators": ("global:0.5", "global:0.9"), "mask_interval": 3},
    "sometimes plain": {"operators": "global:0.7", "base_step_probability": 0.4},
}


def training(base="SGD", kind="CrAM+"):
    """Returns a model and its optimizer, always the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = BASES[base](model.parameters())
    if CRAMS[kind] is not None:
        options = {**CRAMS[kind]}
        optimizer = CrAM(model, optimizer, options.pop("operators"), **options)
    return model, optimizer


def batches(sizes=(32, 32, 32, 32, 20)):
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(size, 16, generator=generator),
            torch.randint(4, (size,), generator=generator),
        )
        for size in sizes
    ]


def by_hand(model, optimizer, data, shares=None, scheduler=None):
    """Returns the losses of the steps that a loop takes."""

    def closure_on(x, y):
        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        return closure

    losses = []
    for batch in data:
        parts = [batch] if shares is None else split_batch(batch, *shares)
        losses.append(optimizer.step(*(closure_on(*part) for part in parts)).item())
        if scheduler is not None:
            scheduler.step()
    return losses


def loss_on(model):
    return lambda batch: cross_entropy(model(batch[0]), batch[1])


def assert_same_state(ours, theirs):
    for mine, other in zip(ours, theirs, strict=True):
        left, right = (torch.utils._pytree.tree_leaves(t.state_dict()) for t in (mine, other))
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.fixture(params=["eager", "captured"])
def path(request, monkeypatch):
    """Takes the steps as the CPU does, and with the copies and losses of the captured path."""
    if request.param == "captured":
        monkeypatch.setattr(Replayed, "made", 0)
        monkeypatch.setattr(graphed_step, "StepGraphs", Replayed)
        init = GraphedStep.__init__

        def as_on_a_gpu(self, *args, **kwargs):
            init(self, *args, **kwargs)
            self._captures = True

        monkeypatch.setattr(GraphedStep, "__init__", as_on_a_gpu)
    return request.param


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", CRAMS)
def test_the_steps_are_those_of_a_loop(base, kind, path):  # noqa: ARG001
    ours, theirs = training(base, kind), training(base, kind)
    step = GraphedStep(*ours, loss_on(ours[0]))
    losses = [step(batch) for batch in batches()]
    step.check()
    assert [loss.item() for loss in losses] == by_hand(*theirs, batches())
    assert not any(loss.requires_grad for loss in losses)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize("shares", [(0.5, 0.5), (1.0, 0.5), (0.75, 0.5)])
@pytest.mark.parametrize("kind", ["CrAM+", "C-SAM"])
def test_shares_of_a_batch(shares, kind, path):  # noqa: ARG001
    ours, theirs = training(kind=kind), training(kind=kind)
    dense, compressed = shares
    step = GraphedStep(*ours, loss_on(ours[0]), dense_share=dense, compressed_share=compressed)
    losses = [step(batch).item() for batch in batches()]
    assert losses == by_hand(*theirs, batches(), shares)
    assert_same_state(ours, theirs)


@pytest.mark.parametrize(
    "wrap",
    [list, lambda pair: Pair(*pair), lambda pair: {"x": pair[0], "y": pair[1], "name": "digits"}],
    ids=["list", "namedtuple", "dict"],
)
def test_batches_of_other_types(wrap, path):
    ours, theirs = training(), training()
    seen = []

    def loss_of(batch):
        seen.append(batch)
        x, y = (batch["x"], batch["y"]) if isinstance(batch, dict) else batch
        return cross_entropy(ours[0](x), y)

    step = GraphedStep(*ours, loss_of, dense_share=0.5, compressed_share=0.5)
    losses = [step(wrap(batch)).item() for batch in batches()]
    assert losses == by_hand(*theirs, batches(), (0.5, 0.5))
    assert {type(batch) for batch in seen} == {type(wrap(batches()[0]))}
    assert path == "eager" or Replayed.made == 1


def test_a_tensor_is_a_batch(path):  # noqa: ARG001
    model, optimizer = training()
    step = GraphedStep(model, optimizer, lambda x: model(x).square().mean())
    assert step(batches()[0][0]) > step(batches()[0][0])


def test_learning_rates_of_schedulers_and_groups(path):  # noqa: ARG001
    ours, theirs = training(), training()
    ends = []
    for _, optimizer in (ours, theirs):
        ends.append(lr_scheduler.CosineAnnealingLR(optimizer, T_max=5))
    step = GraphedStep(*ours, loss_on(ours[0]))
    for batch in batches():
        step(batch)
        ends[0].step()
    by_hand(*theirs, batches(), scheduler=ends[1])
    assert_same_state(ours, theirs)


def test_a_batch_is_copied_before_its_memory_is_used_again(path):  # noqa: ARG001
    ours, theirs = training(), training()
    step = GraphedStep(*ours, loss_on(ours[0]))
    memory = [part.clone() for part in batches()[0]]
    for batch in batches()[:4]:
        for part, value in zip(memory, batch, strict=True):
            part.copy_(value)
        step(memory)
    by_hand(*theirs, batches()[:4])
    assert_same_state(ours, theirs)


def test_a_state_that_is_loaded_later_continues_exactly(path):
    ours, theirs = training("AdamW", "interval"), training("AdamW", "interval")
    step = GraphedStep(*ours, loss_on(ours[0]))
    for batch in batches()[:2]:
        step(batch)
    saved = copy.deepcopy([part.state_dict() for part in ours])
    for batch in batches()[2:]:
        step(batch)
    for part, state in zip(ours, saved, strict=True):
        part.load_state_dict(state)
    for batch in batches()[2:]:
        step(batch)
    by_hand(*theirs, batches())
    assert_same_state(ours, theirs)
    assert path == "eager" or Replayed.made == 2  # the state has other memory


def test_the_shape_of_an_example_is_captured(path):
    ours, theirs = training(), training()
    step = GraphedStep(*ours, loss_on(ours[0]), example_batch=batches()[0])
    data = batches((20, 32, 32))
    for batch in data:
        step(batch)
    by_hand(*theirs, data)
    assert_same_state(ours, theirs)
    if path == "captured":
        assert Replayed.made == 1
        assert len(step._batch[0]) == 32


def test_an_error_between_captured_steps_drops_their_graphs(path):
    ours = training(kind="interval")
    step = GraphedStep(*ours, loss_on(ours[0]))
    step(batches()[0])
    with pytest.raises(FloatingPointError, match="NaN"):
        step((torch.full((3, 16), torch.nan), torch.zeros(3, dtype=torch.int64)))
    step(batches()[1])
    assert path == "eager" or Replayed.made == 2


@pytest.mark.parametrize("path", ["captured"], indirect=True)
def test_another_mode_than_that_of_the_capture_is_refused(path):  # noqa: ARG001
    model, optimizer = training()
    step = GraphedStep(model, optimizer, loss_on(model))
    step(batches()[0])
    model.eval()
    with pytest.raises(ValueError, match=r"captured in training mode.*call model.train\(True\)"):
        step(batches()[1])
    model.train()
    step(batches()[1])


@pytest.mark.parametrize("path", ["captured"], indirect=True)
def test_concurrent_passes_that_change_a_buffer_are_refused(path):  # noqa: ARG001
    model, optimizer = training()
    model.register_buffer("calls", torch.zeros(()))

    def loss_of(batch):
        model.calls += 1
        return cross_entropy(model(batch[0]), batch[1])

    step = GraphedStep(model, optimizer, loss_of, concurrent_passes=True)
    with pytest.raises(ValueError, match="they change buffers of the model: calls"):
        step(batches()[0])


def test_by_default_an_ascent_that_comes_later_is_no_error(path):  # noqa: ARG001
    model, optimizer = training()
    for group in optimizer.param_groups:
        group["rho"] = 0.0
    step = GraphedStep(model, optimizer, loss_on(model), dense_share=0.5, compressed_share=0.5)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["rho"] = 0.05
    optimizer.load_state_dict(state)
    for batch in batches():
        step(batch)
    step.check()


def test_the_optimizer_does_not_keep_a_step_alive():
    model, optimizer = training()
    step = weakref.ref(GraphedStep(model, optimizer, loss_on(model)))
    gc.collect()
    assert step() is None
    optimizer.load_state_dict(optimizer.state_dict())


def test_autocast_around_the_step(path):  # noqa: ARG001
    ours, theirs = training(kind="plain"), training(kind="plain")
    step = GraphedStep(*ours, loss_on(ours[0]))
    half = torch.autocast("cpu", torch.bfloat16)
    for batch in batches():
        with half:
            by_hand(*theirs, [batch])
    with half:  # the weights are cast anew at every step
        for batch in batches():
            step(batch)
    assert_same_state(ours, theirs)


def test_gradients_are_clipped_by_a_hook_of_the_base_optimizer(path):  # noqa: ARG001
    ours, theirs = training(), training()

    def clip(optimizer, *_):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 0.1)

    ours[1].base.register_step_pre_hook(clip)
    step = GraphedStep(*ours, loss_on(ours[0]))
    model, optimizer = theirs
    for x, y in batches():
        step((x, y))
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        with optimizer.compressed():
            cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    assert_same_state(ours, theirs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dense_share": 0}, "the dense share must be above 0 and at most 1, got 0"),
        ({"compressed_share": 1.5}, "the compressed share must be above 0 and at most 1, got 1.5"),
        ({"example_batch": object()}, "a batch holds a object; allowed: tensors"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    model, optimizer = training()
    with pytest.raises(ValueError, match=message):
        GraphedStep(model, optimizer, loss_on(model), **options)


def test_shares_with_a_plain_optimizer_are_refused():
    model, optimizer = training(kind="plain")
    with pytest.raises(ValueError, match="need CrAM, which has a pass for each; SGD takes whole"):
        GraphedStep(model, optimizer, loss_on(model), dense_share=0.5, compressed_share=0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: CrAM(m, SGD(m.parameters(), lr=0.1), "global:0.3-0.9"), "at every step"),
        (
            lambda m: CrAM(m, SGD(m.parameters(), lr=0.1), "int4", replay_randomness=True),
            "replay_randomness=True cannot be captured",
        ),
        (lambda m: RMSprop(m.parameters()), "this RMSprop cannot be captured; allowed: SGD"),
        (
            lambda m: CrAM(m, SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.1), "int4"),
            "allowed: SGD without dampening",
        ),
    ],
)
def test_what_no_gpu_can_capture_is_refused_everywhere(make, message):
    model, _ = training()
    with pytest.raises(ValueError, match=message):
        GraphedStep(model, make(model), loss_on(model))


def test_several_processes_are_refused(monkeypatch):
    model, _ = training()
    monkeypatch.setattr(DistributedDataParallel, "__init__", nn.Module.__init__)
    wrapped = DistributedDataParallel()
    wrapped.module = model
    with pytest.raises(ValueError, match=r"several processes \(DDP, FSDP\) cannot be captured"):
        GraphedStep(wrapped, SGD(model.parameters(), lr=0.1), loss_on(model))


@pytest.mark.parametrize(
    ("loss_of", "message"),
    [
        (lambda _: 1.0, "depends on the parameters, got float"),
        (lambda batch: batch[0], r"got a tensor of shape \(32, 16\) without a gradient"),
        (lambda _: torch.zeros(()), r"got a tensor of shape \(\) without a gradient"),
        (lambda _: torch.zeros(2, requires_grad=True), r"of shape \(2,\) with a gradient"),
    ],
)
def test_what_is_not_a_loss_is_refused(loss_of, message, path):  # noqa: ARG001
    model, optimizer = training()
    before = copy.deepcopy(model.state_dict())
    step = GraphedStep(model, optimizer, loss_of)
    with pytest.raises(TypeError, match=message):
        step(batches()[0])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def test_batches_that_cannot_be_captured_or_split_are_refused(path):  # noqa: ARG001
    model, optimizer = training()
    step = GraphedStep(model, optimizer, loss_on(model), dense_share=0.5, compressed_share=0.5)
    with pytest.raises(ValueError, match="a batch holds a ndarray"):
        step((torch.zeros(2, 16), torch.zeros(2).numpy()))
    with pytest.raises(ValueError, match="leave a pass without a sample in a batch of 1"):
        step((torch.zeros(1, 16), torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"as many samples each, got \[2, 4\]"):
        step((torch.zeros(4, 16), torch.zeros(2, dtype=torch.int64)))


def captured(optimizer):
    """Returns graphs as far as they watch the options of an optimizer."""
    graphs = StepGraphs.__new__(StepGraphs)
    graphs._optimizer, graphs._options = optimizer, _options(optimizer)
    graphs._rates = [torch.tensor(group["lr"]) for group in optimizer.param_groups]
    return graphs


def test_learning_rates_that_are_assigned_are_read():
    _, optimizer = training()
    graphs = captured(optimizer)
    graphs._read_rates()
    (group,) = optimizer.param_groups
    assert group["lr"] is graphs._rates[0]
    for value in (0.25, torch.tensor(0.25)):
        group["lr"] = value
        graphs._read_rates()
        assert group["lr"] is graphs._rates[0]
        assert group["lr"].item() == 0.25


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda o: o.param_groups[0].update(momentum=0.8), "momentum of parameter group 0 was 0.9"),
        (lambda o: o.param_groups[0].update(rho=0.5), "rho of parameter group 0 was 0.05"),
        (lambda o: setattr(o, "rho", 0.5), "rho of parameter group 0 was 0.05 and has become 0.5"),
        (
            lambda o: o.param_groups[0]["params"].pop(),
            "the number of parameters of parameter group 0 was 6 and has become 5",
        ),
        (
            lambda o: o.add_param_group({"params": [o.param_groups[0]["params"].pop()]}),
            "parameter groups were 1 and have become 2",
        ),
    ],
)
def test_other_options_than_the_learning_rate_must_stay(change, message):
    _, optimizer = training()
    optimizer.rho = 0.05
    graphs = captured(optimizer)
    change(optimizer)
    with pytest.raises(ValueError, match=re.escape(message)):
        graphs._read_rates()
