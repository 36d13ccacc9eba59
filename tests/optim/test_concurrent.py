"""With w~ in memory of its own, steps are the same, and w never moves."""

import copy
import io
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from nets import ConvNet, closure_for
from replayed import FakeEvent, FakeStream, apart, fake_streams
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK, TOPK_PLUS, CrAM, GraphedStep
from torchcram.optim.concurrent import (
    BufferWatch,
    SideStreamPoint,
    backup_of,
    default_concurrency,
    using_backup,
    why_not_concurrent,
)
from torchcram.optim.graphs import StepGraphs, _streams

INDEPENDENT = [CRAM, CRAM_PLUS, TOPK, TOPK_PLUS]
OPERATORS = ["global:0.5", "uniform:0.75", "nm:2:4", "int4", "global:0.5+int8"]


class Attention(nn.Module):
    """Attention with fused input projections, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = self.attention(x, x, x)[0]
        return self.head(self.second(torch.relu(self.first(x))).mean(1))


def convolutions():
    return ConvNet(), (torch.randn(6, 4, 5, 5), torch.randint(5, (6,)))


def attention():
    return Attention(), (torch.randn(6, 3, 8), torch.randint(5, (6,)))


def build(make, rule=CRAM_PLUS, base=SGD, **options):
    torch.manual_seed(0)
    model, batch = make()
    optimizer = CrAM(
        model, base(model.parameters(), lr=0.05), OPERATORS, rule=rule, rho=0.0, **options
    )
    return model, optimizer, closure_for(model, optimizer, batch)


def assert_same(ours, theirs):
    left, right = (torch.utils._pytree.tree_leaves(part.state_dict()) for part in (ours, theirs))
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("base", [SGD, AdamW])
@pytest.mark.parametrize("rule", INDEPENDENT, ids=lambda rule: rule.name)
@pytest.mark.parametrize("make", [convolutions, attention])
@pytest.mark.parametrize(
    "options", [{}, {"mask_interval": 3}, {"base_step_probability": 0.4}], ids=str
)
def test_steps_are_the_same_bit_for_bit(make, rule, base, options):
    model, optimizer, closure = build(make, rule, base, **options)
    expected, other, other_closure = build(make, rule, base, **options)
    for _ in range(12):
        with apart(optimizer):
            loss = optimizer.step(closure)
        assert torch.equal(loss, other.step(other_closure))
    assert_same(model, expected)
    assert_same(optimizer, other)


def test_w_stays_in_its_memory_and_is_not_written_at_w_tilde():
    model, optimizer, closure = build(convolutions)
    pointers = [p.data_ptr() for p in model.parameters()]
    memory = {name: p.detach() for name, p in model.named_parameters()}  # the memory of w
    values = {name: p.clone() for name, p in memory.items()}
    seen = []

    def at_compressed():
        seen.append(True)
        assert all(torch.equal(memory[name], value) for name, value in values.items())
        assert model.conv1.weight.data_ptr() not in pointers
        assert model.conv1.bias.data_ptr() in pointers  # is not compressed
        return closure()

    with apart(optimizer):
        optimizer.step(closure, at_compressed)
    assert seen
    assert [p.data_ptr() for p in model.parameters()] == pointers


@pytest.mark.parametrize("fails_at", [0, 1])
def test_an_error_in_a_pass_leaves_w_where_it_was(fails_at):
    model, optimizer, closure = build(convolutions)
    pointers = [p.data_ptr() for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    calls = []

    def failing():
        calls.append(True)
        if len(calls) > fails_at:
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt), apart(optimizer):
        optimizer.step(failing)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    optimizer.step(closure)


def test_no_more_memory_than_steps_one_after_another():
    _, optimizer, closure = build(convolutions)
    optimizer.step(closure)
    held = {id(copy) for _, copy in optimizer._backup._copies.values()}
    with apart(optimizer):
        optimizer.step(closure)
    assert {id(copy) for _, copy in optimizer._backup._copies.values()} == held


def test_a_checkpoint_between_steps_of_both_kinds():
    model, optimizer, closure = build(convolutions, mask_interval=2)
    with apart(optimizer):
        for _ in range(3):
            optimizer.step(closure)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    again, other, other_closure = build(convolutions, mask_interval=2)
    file.seek(0)
    for part, state in zip((again, other), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    for _ in range(4):
        optimizer.step(closure)
        with apart(other):
            other.step(other_closure)
    assert_same(model, again)


def test_which_passes_can_run_at_the_same_time():
    model = nn.Linear(4, 4)
    base = SGD(model.parameters(), lr=0.1)
    for rule in INDEPENDENT:
        assert why_not_concurrent(CrAM(model, base, "global:0.5", rule=rule)) is None
    assert "SGD has no pass" in why_not_concurrent(base)
    assert "ascent" in why_not_concurrent(CrAM(model, base, (), rule=SAM))
    assert "build on one another" in why_not_concurrent(CrAM(model, base, "int4", rule=C_SAM))
    assert "ascent" in why_not_concurrent(CrAM(model, base, "int4", rho=0.1))
    groups = [{"params": model.parameters(), "rho": 0.1}]
    assert "ascent" in why_not_concurrent(CrAM(model, SGD(groups, lr=0.1), "int4"))


def test_by_default_where_activations_are_no_more_than_those_of_a_plain_step():
    assert default_concurrency(0.5, 0.5) is None
    assert default_concurrency(0.7, 0.3) is None
    assert default_concurrency(0.5, 0.25) is None
    assert default_concurrency(1.0, 0.5) is False
    assert default_concurrency(1.0, 1.0) is False


@pytest.mark.parametrize("kind", ["parameter", "buffer"])
def test_weights_that_share_memory_with_another_tensor_are_named(kind):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    if kind == "parameter":  # two parameters, one storage, as in flattened recurrent layers
        model[1].weight.data = model[0].weight.data
    else:
        model[1].register_buffer("first_rows", model[0].weight.detach()[:2])
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5")
    reason = why_not_concurrent(optimizer)
    assert "share memory with its weights" in reason
    assert reason.endswith(": 0.weight, 1.weight" if kind == "parameter" else ": 0.weight")


def test_tied_weights_may_be_moved_together():
    _, optimizer, _ = build(attention)
    assert why_not_concurrent(optimizer) is None


def test_passes_that_depend_on_one_another_are_refused():
    model = nn.Linear(4, 4)
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1, fused=True), "global:0.5", rho=0.1)

    def loss_of(batch):
        return cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ValueError, match=r"cannot run at the same time: the ascent .* \(set rho=0"):
        GraphedStep(model, optimizer, loss_of, concurrent_passes=True)
    GraphedStep(model, optimizer, loss_of, dense_share=0.5, compressed_share=0.5)


class Counting(nn.Module):
    """Counts its calls on the device."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x


class Codebook(nn.Module):
    """Averages its inputs past autograd, which does not count such writes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.mean.data.lerp_(x.detach().mean(0), 0.1)
        return x


class Renormalizing(nn.BatchNorm1d):
    """Reads its running mean in training, also at w~, where it does not change."""

    def forward(self, x):
        return super().forward(x) + self.running_mean.detach()


def fused_observer():
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize

    return FusedMovingAvgObsFakeQuantize()


WATCHED = {
    "counting": (Counting, {"1.calls"}),
    "codebook": (Codebook, {"1.mean"}),
    "renormalizing": (
        lambda: Renormalizing(8),
        {"1.running_mean", "1.running_var", "1.num_batches_tracked"},
    ),
    "observer": (fused_observer, {"1.activation_post_process.min_val", "1.scale"}),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        {"1.parametrizations.weight.0._u"},
    ),
    "batch norm": (lambda: nn.BatchNorm1d(8), set()),
    "dropout": (nn.Dropout, set()),
}


def watched(kind):
    torch.manual_seed(0)
    layer, found = WATCHED[kind]
    model = nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 5))
    base = SGD(model.parameters(), lr=0.1, fused=True)
    optimizer = CrAM(model, base, "global:0.5", weights={"0.weight": model[0].weight})
    batch = torch.randn(6, 8), torch.randint(5, (6,))
    return model, optimizer, batch, found


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
@pytest.mark.parametrize("kind", WATCHED)
def test_buffers_that_passes_would_race_for_are_named(kind):
    model, optimizer, batch, found = watched(kind)
    watch = BufferWatch(backup_of(optimizer), (model,))
    with using_backup(optimizer, watch):
        optimizer.step(closure_for(model, optimizer, batch))
    assert (found <= watch.changed) if found else not watch.changed


@pytest.fixture
def streams(monkeypatch):
    """The first stream, current, and the one beside it."""
    return fake_streams(monkeypatch), FakeStream(torch.device("cpu"))


def test_the_second_stream_starts_with_the_step_and_is_waited_for(streams):
    first, side = streams
    _, optimizer, closure = build(convolutions)
    seen = []

    def watched_closure():
        seen.append(torch.cuda.current_stream())
        return closure()

    with using_backup(optimizer, SideStreamPoint(backup_of(optimizer), side)):
        optimizer.step(watched_closure)
    assert seen == [first, side]
    assert [type(each) for each in side.waited] == [FakeEvent]
    assert first.waited == [side]
    assert torch.cuda.current_stream() is first


@pytest.mark.parametrize("at", ["pass", "join"])
def test_an_error_in_a_capture_brings_the_first_stream_and_w_back(streams, at):
    first, side = streams
    model, optimizer, closure = build(convolutions)
    before = copy.deepcopy(model.state_dict())
    calls = []

    def failing():
        calls.append(True)
        if len(calls) == 2:
            first.fails = at == "join"  # as all calls do in a capture that was invalidated
            raise KeyboardInterrupt
        return closure()

    expected = RuntimeError if at == "join" else KeyboardInterrupt
    with (
        pytest.raises(expected),
        using_backup(optimizer, SideStreamPoint(backup_of(optimizer), side)),
    ):
        optimizer.step(failing)
    assert torch.cuda.current_stream() is first
    first.fails = False
    optimizer.state_dict()  # puts back what the error has left
    assert torch.cuda.current_stream() is first
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    optimizer.step(closure)


def test_the_copy_has_the_strides_of_the_weight():
    model, optimizer, closure = build(convolutions)
    optimizer.step(closure)
    model.to(memory_format=torch.channels_last)
    strides = []
    with apart(optimizer):
        optimizer.step(closure, lambda: strides.append(model.conv1.weight.stride()) or closure())
    assert strides == [model.conv1.weight.stride()]


def test_autocast_and_dropout():
    def make():
        layers = nn.Linear(8, 32), nn.Dropout(0.5), nn.ReLU(), nn.LayerNorm(32), nn.Linear(32, 5)
        return nn.Sequential(*layers), (torch.randn(6, 8), torch.randint(5, (6,)))

    states = []
    for context in (apart, lambda _: nullcontext()):
        model, optimizer, closure = build(make, base=AdamW)
        torch.manual_seed(1)
        for _ in range(6):
            with context(optimizer), torch.autocast("cpu", torch.bfloat16):
                optimizer.step(closure)
        states.append(model.state_dict())
    for name, value in states[0].items():
        assert torch.equal(states[1][name], value)


class Uncaptured(StepGraphs):
    """Steps whose graphs run the body on the CPU; all that the host does is that of a GPU."""

    def _capture(self, plan, pool):  # noqa: ARG002
        return SimpleNamespace(replay=lambda: self._run(plan))


@pytest.fixture
def fake_cuda(monkeypatch):
    _streams.cache_clear()
    yield fake_streams(monkeypatch)
    _streams.cache_clear()


@pytest.mark.parametrize("asked", [True, False, None])
@pytest.mark.parametrize("kind", ["batch norm", "counting"])
def test_whole_steps_decide_in_their_warm_up(fake_cuda, kind, asked):
    model, optimizer, batch, changing = watched(kind)
    before = copy.deepcopy(model.state_dict())
    closure, seen = closure_for(model, optimizer, batch), []

    def watched_closure():
        seen.append(torch.cuda.current_stream())
        return closure()

    def make():
        return Uncaptured(
            model, optimizer, lambda: optimizer.step(watched_closure), concurrent_passes=asked
        )

    if changing and asked:
        with pytest.raises(ValueError, match=r"they change buffers of the model: 1\.calls"):
            make()
    else:
        take = make()
        assert take.concurrent_passes is (not changing and asked is not False)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert torch.cuda.current_stream() is fake_cuda
    if changing and asked:
        return
    first, side = _streams(torch.device("cpu"))
    both = {first, side} if take.concurrent_passes else {first}
    assert set(seen) == both
    assert side is not first
    assert fake_cuda.waited == [first]  # the warm-up has ended before the model is put back
    _, other, _, _ = watched(kind)
    theirs = closure_for(other.model, other, batch)
    for _ in range(4):
        take()
        other.step(theirs)
    take.check()
    assert_same(model, other.model)


def test_an_error_in_the_warm_up_is_waited_for_and_leaves_the_model(fake_cuda):
    model, optimizer, batch, _ = watched("batch norm")
    before = copy.deepcopy(model.state_dict())
    closure, calls = closure_for(model, optimizer, batch), []

    def failing():
        calls.append(True)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt):
        Uncaptured(model, optimizer, lambda: optimizer.step(failing), concurrent_passes=True)
    assert fake_cuda.waited == [_streams(torch.device("cpu"))[0]]
    assert torch.cuda.current_stream() is fake_cuda
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
