"""With w~ in memory of its own, steps are the same, and w never moves."""

import copy
import io

import pytest
import torch
from nets import ConvNet, closure_for
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK, TOPK_PLUS, CrAM, GraphedStep
from torchcram.optim.graphs import concurrent_by_default, concurrent_passes, why_not_concurrent

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
        with concurrent_passes(optimizer, None):
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

    with concurrent_passes(optimizer, None):
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

    with pytest.raises(KeyboardInterrupt), concurrent_passes(optimizer, None):
        optimizer.step(failing)
    assert [p.data_ptr() for p in model.parameters()] == pointers
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
    optimizer.step(closure)


def test_no_more_memory_than_steps_one_after_another():
    _, optimizer, closure = build(convolutions)
    optimizer.step(closure)
    held = {id(copy) for _, copy in optimizer._backup._copies.values()}
    with concurrent_passes(optimizer, None):
        optimizer.step(closure)
    assert {id(copy) for _, copy in optimizer._backup._copies.values()} == held


def test_a_checkpoint_between_steps_of_both_kinds():
    model, optimizer, closure = build(convolutions, mask_interval=2)
    with concurrent_passes(optimizer, None):
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
        with concurrent_passes(other, None):
            other.step(other_closure)
    assert_same(model, again)


def test_which_passes_can_run_at_the_same_time():
    model = nn.Linear(4, 4)
    base = SGD(model.parameters(), lr=0.1)
    for rule in INDEPENDENT:
        optimizer = CrAM(model, base, "global:0.5", rule=rule)
        assert why_not_concurrent(optimizer) is None
        assert concurrent_by_default(optimizer, 0.5, 0.5)
        assert not concurrent_by_default(optimizer, 1.0, 0.5)
    assert "SGD has no pass" in why_not_concurrent(base)
    assert "ascent" in why_not_concurrent(CrAM(model, base, (), rule=SAM))
    assert "build on one another" in why_not_concurrent(CrAM(model, base, "int4", rule=C_SAM))
    assert "ascent" in why_not_concurrent(CrAM(model, base, "int4", rho=0.1))
    groups = [{"params": model.parameters(), "rho": 0.1}]
    assert "ascent" in why_not_concurrent(CrAM(model, SGD(groups, lr=0.1), "int4"))
    model = nn.Sequential(nn.LSTM(4, 4))
    base = SGD(model.parameters(), lr=0.1)
    assert "one block of memory" in why_not_concurrent(CrAM(model, base, "int4"))


def test_passes_that_depend_on_one_another_are_refused():
    model = nn.Linear(4, 4)
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1, fused=True), "global:0.5", rho=0.1)

    def loss_of(batch):
        return cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(ValueError, match=r"cannot run at the same time: the ascent .* \(set rho=0"):
        GraphedStep(model, optimizer, loss_of, concurrent_passes=True)
    GraphedStep(model, optimizer, loss_of, dense_share=0.5, compressed_share=0.5)


class Counting(nn.Module):
    """Counts its calls on the device, as observers of activations do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return x


@pytest.mark.parametrize("kind", ["counting", "spectral norm", "batch norm"])
def test_buffers_that_both_passes_change_are_named(kind):
    torch.manual_seed(0)
    layer = {
        "counting": Counting,
        "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        "batch norm": lambda: nn.BatchNorm1d(8),
    }[kind]()
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 5))
    weights = {"0.weight": model[0].weight}
    base = SGD(model.parameters(), lr=0.1)
    optimizer = CrAM(model, base, "global:0.5", weights=weights)
    batch = torch.randn(6, 8), torch.randint(5, (6,))
    with concurrent_passes(optimizer, None) as point:
        optimizer.step(closure_for(model, optimizer, batch))
    named = {"counting": "1.calls", "spectral norm": "1.parametrizations.weight.0._u"}
    assert (named[kind] in point.written) if kind in named else not point.written
