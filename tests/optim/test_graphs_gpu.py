"""Steps captured as CUDA graphs do what steps one kernel at a time do."""

import copy
import io
import random

import pytest
import torch
from resident import Resident
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW, lr_scheduler

from torchcram import C_SAM, CRAM_PLUS, SAM, CrAM, GraphedStep, split_batch
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
    for optimizer in (CrAM(given.model, base, "global:0.5"), base):
        with pytest.raises(ValueError, match=r"use a fused optimizer \(fused=True\)"):
            StepGraphs(given.model, optimizer, given.step)


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


class Loop:
    """A loop over batches on the CPU, the last of them short, by hand or with `GraphedStep`."""

    def __init__(self, base="SGD", kind="CrAM+", *, shares=(1.0, 1.0), backend=None):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
        ).cuda()
        self.optimizer = BASES[base](self.model.parameters())
        if CRAMS[kind] is not None:
            options = {**CRAMS[kind]}
            self.optimizer = CrAM(self.model, self.optimizer, options.pop("operators"), **options)
        self.scheduler = lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=0.1, total_steps=40, cycle_momentum=False
        )
        self.shares = shares
        self.run = self.model if backend is None else torch.compile(self.model, backend=backend)

    def graphed_step(self, **options):
        dense, compressed = self.shares
        return GraphedStep(
            self.model,
            self.optimizer,
            self.loss_of,
            dense_share=dense,
            compressed_share=compressed,
            **options,
        )

    def loss_of(self, batch):
        return cross_entropy(self.run(batch["x"]), batch["y"])

    def by_hand(self, batch):
        batch = {name: value.cuda() for name, value in batch.items()}
        parts = [batch] if self.shares == (1, 1) else split_batch(batch, *self.shares)

        def closure_on(part):
            def closure():
                self.optimizer.zero_grad()
                loss = self.loss_of(part)
                loss.backward()
                return loss

            return closure

        loss = self.optimizer.step(*map(closure_on, parts))
        self.scheduler.step()
        return loss.detach()

    def epoch(self, step):
        return [self.take(step, batch) for batch in loop_batches()]

    def take(self, step, batch):
        loss = step(batch)
        self.scheduler.step()
        return loss

    def state(self):
        return [part.state_dict() for part in (self.model, self.optimizer, self.scheduler)]


def loop_batches():
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(size, 16, generator=generator).pin_memory(),
            "y": torch.randint(4, (size,), generator=generator),
        }
        for size in (32, 32, 32, 32, 20)
    ]


def assert_close(ours, theirs):
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", CRAMS)
def test_your_own_loop_with_a_scheduler_and_a_short_batch(base, kind):
    eager, graphed = Loop(base, kind), Loop(base, kind)
    step = graphed.graphed_step()
    for _ in range(4):
        theirs = [eager.by_hand(batch) for batch in loop_batches()]
        ours = graphed.epoch(step)
        step.check()
        torch.testing.assert_close(torch.stack(ours), torch.stack(theirs), rtol=1e-3, atol=1e-4)
    assert step._graphs is not None
    assert_close(graphed.model, eager.model)
    if kind != "plain":
        assert graphed.optimizer.operator == eager.optimizer.operator
        ours, theirs = (t.optimizer.state_dict()["cram"] for t in (graphed, eager))
        assert torch.equal(ours["generator"], theirs["generator"])
        assert ours["uses"] == theirs["uses"]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (1.0, 0.5)])
def test_shares_of_a_batch_in_a_graph(shares):
    eager, graphed = Loop(shares=shares), Loop(shares=shares)
    step = graphed.graphed_step()
    for _ in range(4):
        for batch in loop_batches():
            eager.by_hand(batch)
        graphed.epoch(step)
    step.check()
    assert_close(graphed.model, eager.model)


class Block(nn.Module):
    """Convolutions, batch norm and attention: works whose kernels differ between the passes."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(32, 10)

    def forward(self, x):
        x = self.dropout(torch.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("backend", [None, "inductor"])
@pytest.mark.parametrize("kind", ["CrAM+", "interval", "sometimes plain"])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.filterwarnings("ignore:Memory Efficient attention defaults:UserWarning")
def test_passes_at_the_same_time_are_those_one_after_another(kind, backend):
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    try:
        states = []
        for concurrent in (False, True):
            torch.compiler.reset()
            torch.manual_seed(0)
            model = Block().cuda()
            run = model if backend is None else torch.compile(model, backend=backend)
            options = {**CRAMS[kind]}
            base = BASES["SGD"](model.parameters())
            optimizer = CrAM(model, base, options.pop("operators"), **options)
            step = GraphedStep(
                model,
                optimizer,
                lambda batch, run=run: cross_entropy(run(batch[0]), batch[1]),
                dense_share=0.5,
                compressed_share=0.5,
                concurrent_passes=concurrent,
            )
            pointers = [p.data_ptr() for p in model.parameters()]
            for number in range(30):
                generator = torch.Generator().manual_seed(number)
                x = torch.randn(32, 4, 12, 12, generator=generator)
                step((x, torch.randint(10, (32,), generator=generator)))
            step.check()
            assert step._graphs.concurrent_passes is concurrent
            assert [p.data_ptr() for p in model.parameters()] == pointers
            states.append(model.state_dict())
    finally:
        torch.use_deterministic_algorithms(mode=False)
    one, other = states
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=1e-4, atol=1e-5, msg=name)


class Counting(nn.Module):
    """Counts its calls on the device, in a buffer that both passes of a step change."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_passes_that_change_a_buffer_run_one_after_the_other():
    model = Counting().cuda()
    optimizer = CrAM(model, BASES["SGD"](model.parameters()), "global:0.5")
    shares = {"dense_share": 0.5, "compressed_share": 0.5}

    def loss_of(batch):
        return cross_entropy(model(batch["x"]), batch["y"])

    step = GraphedStep(model, optimizer, loss_of, **shares)
    for batch in loop_batches()[:4] * 5:
        step(batch)
    step.check()
    assert not step._graphs.concurrent_passes
    assert model.calls.item() == 40
    with pytest.raises(ValueError, match="they change buffers of the model: calls"):
        GraphedStep(model, optimizer, loss_of, **shares, concurrent_passes=True)(loop_batches()[0])
    assert model.calls.item() == 40


def test_losses_of_earlier_steps_stay():
    graphed = Loop()
    step = graphed.graphed_step()
    losses = graphed.epoch(step)
    before = [loss.item() for loss in losses]
    graphed.epoch(step)
    assert [loss.item() for loss in losses] == before


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["plain", "CrAM+", "interval"])
@pytest.mark.parametrize("again", [False, True], ids=["new process", "same step"])
def test_save_and_continue_after_a_capture(base, kind, again):
    straight, saving = Loop(base, kind), Loop(base, kind)
    step, saved_step = straight.graphed_step(), saving.graphed_step()
    for loop, taker in ((straight, step), (saving, saved_step)):
        loop.epoch(taker)
    file = io.BytesIO()
    torch.save(saving.state(), file)
    straight.epoch(step)
    continued = saving if again else Loop(base, kind)
    if again:
        saving.epoch(saved_step)  # goes on, and then back
    file.seek(0)
    state = torch.load(file, map_location="cpu", weights_only=True)
    parts = (continued.model, continued.optimizer, continued.scheduler)
    for part, values in zip(parts, state, strict=True):
        part.load_state_dict(values)
    continued.epoch(saved_step if again else continued.graphed_step())
    for name, value in straight.model.state_dict().items():
        assert torch.equal(continued.model.state_dict()[name], value), name


def test_a_learning_rate_that_is_assigned_is_read():
    graphed = Loop()
    step = graphed.graphed_step()
    batch = loop_batches()[0]
    step(batch)
    graphed.optimizer.param_groups[0]["lr"] = 0.0
    before = [p.detach().clone() for p in graphed.model.parameters()]
    step(batch)
    assert all(torch.equal(p, q) for p, q in zip(graphed.model.parameters(), before, strict=True))
    graphed.optimizer.param_groups[0]["lr"] = 0.1
    step(batch)
    assert not torch.equal(next(graphed.model.parameters()), before[0])


def test_another_momentum_than_that_of_the_capture_is_refused():
    graphed = Loop()
    step = graphed.graphed_step()
    step(loop_batches()[0])
    graphed.optimizer.param_groups[0]["momentum"] = 0.8
    with pytest.raises(ValueError, match=r"momentum of parameter group 0 was 0\.9 and has become"):
        step(loop_batches()[0])


def test_what_is_not_finite_is_reported_captured_or_not():
    graphed = Loop()
    step = graphed.graphed_step()
    whole, short = loop_batches()[0], loop_batches()[-1]
    step(whole)
    step.check()
    for batch, message in ((whole, "1 step"), (short, "the step before this was not taken")):
        before = [p.detach().clone() for p in graphed.model.parameters()]
        step({**batch, "x": torch.full_like(batch["x"], torch.inf)})
        with pytest.raises(FloatingPointError, match=message):
            step.check()
        after = graphed.model.parameters()
        assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True))
        step.check()


def test_autocast_around_a_captured_step():
    inside, around = Loop(kind="plain"), Loop(kind="plain")

    def loss_of(batch):
        with torch.autocast("cuda", torch.bfloat16):
            return cross_entropy(inside.model(batch["x"]), batch["y"])

    inside.epoch(GraphedStep(inside.model, inside.optimizer, loss_of))
    with torch.autocast("cuda", torch.bfloat16):  # the weights are cast anew at every step
        around.epoch(around.graphed_step())
    assert_close(around.model, inside.model)


def test_adapters_in_a_captured_step():
    peft = pytest.importorskip("peft")
    from torchcram.integrations.peft import LoraCrAM

    models = []
    for captured in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
        model = peft.get_peft_model(net, peft.LoraConfig(r=4, target_modules=["0", "2"])).cuda()
        adapters = [p for p in model.parameters() if p.requires_grad]
        base = AdamW(adapters, lr=0.01, fused=True)
        optimizer = LoraCrAM(model, base, ["global:0.5", "nm:2:4"])
        step = GraphedStep(
            model,
            optimizer,
            lambda batch, model=model: cross_entropy(model(batch["x"]), batch["y"]),
            dense_share=0.5,
            compressed_share=0.5,
        )
        step._captures = captured
        for _ in range(3):
            for batch in loop_batches():
                step(batch)
        step.check()
        models.append(model)
    assert_close(*models)


def test_a_capture_that_fails_leaves_the_generator_in_order():
    graphed = Loop()

    def waiting(batch):
        loss = graphed.loss_of(batch)
        return loss if loss.item() else -loss  # the host must not wait in a capture

    step = GraphedStep(graphed.model, graphed.optimizer, waiting)
    before = [p.detach().clone() for p in graphed.model.parameters()]
    current = torch.cuda.current_stream()
    with pytest.raises(RuntimeError):
        step(loop_batches()[0])
    assert torch.cuda.current_stream() == current
    assert torch.randn(3, device="cuda").isfinite().all()
    after = graphed.model.parameters()
    assert all(torch.equal(p, q) for p, q in zip(after, before, strict=True))
    again = Loop()
    again.epoch(again.graphed_step())


def test_the_stream_that_copies_tables_is_not_captured():
    from torchcram.kernels.cuda import chunks
    from torchcram.optim.graphs import _streams

    for stream in _streams(torch.device("cuda", torch.cuda.current_device())):
        given = training("SGD", {"operators": ("global:0.5", "global:0.9")})
        chunks._copy_streams[stream.device] = stream
        take = StepGraphs(given.model, given.optimizer, given.step, concurrent_passes=True)
        take()
        take.check()
        assert chunks._copy_streams[stream.device] not in _streams(stream.device)


@pytest.mark.filterwarnings("ignore:.*debug mode is a")
def test_replaying_does_not_wait_for_the_device():
    graphed = Loop()
    step = graphed.graphed_step()
    batch = {name: value.pin_memory() for name, value in loop_batches()[0].items()}
    step(batch)
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            graphed.take(step, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_a_compiled_model_in_your_own_loop():
    torch.compiler.reset()
    eager, graphed = Loop(shares=(0.5, 0.5)), Loop(shares=(0.5, 0.5), backend="inductor")
    step = graphed.graphed_step()
    for _ in range(2):
        for batch in loop_batches():
            eager.by_hand(batch)
        graphed.epoch(step)
    step.check()
    for name, value in eager.model.state_dict().items():
        torch.testing.assert_close(graphed.model.state_dict()[name], value, rtol=1e-2, atol=1e-3)


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
