"""Splitting a batch between the dense and the compressed pass, and steps on the parts."""

from collections import OrderedDict, defaultdict, namedtuple
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from torchcram import C_SAM, CRAM_PLUS, CrAM, split_batch
from torchcram.batches import split_rows, split_unless_short

Pair = namedtuple("Pair", "inputs labels")
shares = st.floats(0.01, 1)


@given(st.integers(1, 200), shares, shares)
def test_rows_are_the_first_and_the_last(count, dense, compressed):
    if min(dense, compressed) * count < 1:
        assume(min(dense, compressed) * count < 0.5 and abs(dense + compressed - 1) > 1e-6)
        with pytest.raises(ValueError, match="leave a pass without a sample"):
            split_rows(count, dense, compressed)
        return
    first, second = split_rows(count, dense, compressed)
    assert first.start == 0
    assert second.stop == count
    assert abs(first.stop - dense * count) <= 0.5
    assert abs(second.stop - second.start - compressed * count) <= 1
    assert min(first.stop, second.stop - second.start) >= 1


@given(st.integers(2, 200))
def test_two_halves_have_every_sample_once(count):
    first, second = split_rows(count, 0.5, 0.5)
    assert first.stop == second.start


@given(st.integers(1))
def test_shares_of_one_are_the_whole_batch(count):
    assert split_rows(count, 1.0, 1.0) == (slice(0, count), slice(0, count))


def test_shares_are_read_as_decimals():
    assert split_rows(5, 0.3, 1.0)[0] == slice(0, 2)  # 0.3 as a float is below 3/10
    assert split_rows(2**52 + 1, 1.0, 1.0) == (slice(0, 2**52 + 1), slice(0, 2**52 + 1))


def test_batches_keep_their_type():
    x, y = torch.arange(6).view(6, 1), torch.arange(6)
    dense, compressed = split_batch(x)
    assert torch.equal(dense, x[:3])
    assert torch.equal(compressed, x[3:])
    dense, compressed = split_batch((x, y), 1, 0.5)
    assert torch.equal(dense[0], x)
    assert torch.equal(compressed[1], y[3:])
    pair, _ = split_batch(Pair(x, y))
    assert isinstance(pair, Pair)
    assert torch.equal(pair.labels, y[:3])
    nested = OrderedDict(inputs=[x, {"y": y}], name="digits", scale=torch.tensor(2.0))
    _, last = split_batch(nested)
    assert type(last) is OrderedDict
    assert torch.equal(last["inputs"][1]["y"], y[3:])
    assert (last["name"], last["scale"].item()) == ("digits", 2.0)


def test_lists_with_an_entry_per_sample_are_split():
    x = torch.zeros(4, 1)
    batch = {"x": x, "text": ["a", "b", "c", "d"], "sizes": ((1, 2), (3, 4), (5, 6), (7, 8))}
    batch |= {"split": ["train", "validation"], "scales": [torch.tensor(2.0)] * 4}
    first, second = split_batch(batch, 1, 0.5)
    assert first["text"] == batch["text"]
    assert second["text"] == ["c", "d"]
    assert second["sizes"] == ((5, 6), (7, 8))
    assert second["split"] == ["train", "validation"]  # not an entry per sample
    assert len(second["scales"]) == 4
    names = namedtuple("Names", "a b c d")(*"abcd")
    assert split_batch((x, names))[1][1] == names


def test_mappings_of_other_types():
    filled = defaultdict(list, x=torch.arange(4))
    first, _ = split_batch(filled)
    assert first["x"].tolist() == [0, 1]
    assert first["new"] == []  # the default factory is kept
    assert filled["x"].tolist() == [0, 1, 2, 3]
    frozen = MappingProxyType({"x": torch.arange(4)})
    assert split_batch(frozen)[1]["x"].tolist() == [2, 3]


def test_short_batches_may_be_taken_whole():
    x = torch.arange(1)
    first, second = split_unless_short({"x": x}, 0.5, 0.5)
    assert torch.equal(first["x"], x)
    assert torch.equal(second["x"], x)
    first, second = split_unless_short(torch.arange(3), 1, 0.5)
    assert (first.tolist(), second.tolist()) == ([0, 1, 2], [1, 2])
    with pytest.raises(ValueError, match="the dense share must be above 0"):
        split_unless_short(x, -1, 0.5)
    with pytest.raises(ValueError, match="cannot be split"):
        split_unless_short((x, torch.arange(2)), 0.5, 0.5)


@pytest.mark.parametrize(
    ("batch", "shares", "message"),
    [
        (torch.zeros(4), (0, 0.5), "the dense share must be above 0 and at most 1, got 0"),
        (torch.zeros(4), (0.5, 1.5), "the compressed share must be above 0 and at most 1, got 1.5"),
        (torch.zeros(4), (0.5, float("nan")), "the compressed share must be above 0"),
        (torch.zeros(1), (0.5, 0.5), "leave a pass without a sample in a batch of 1"),
        (torch.zeros(0), (1, 1), "leave a pass without a sample in a batch of 0"),
        ((torch.zeros(4), torch.zeros(5)), (1, 1), r"as many samples each, got \[4, 5\]"),
        (
            {"x": torch.zeros(4), "tokens": [torch.zeros(9)], "name": "a"},
            (1, 1),
            r"a batch of dict cannot be split: .* got \[4, 9\] \(x: 4; tokens: 9\)",
        ),
        ({"text": "no tensors"}, (1, 1), "got no tensors"),
    ],
)
def test_what_cannot_be_split_is_refused(batch, shares, message):
    with pytest.raises(ValueError, match=message):
        split_batch(batch, *shares)


def loss_on(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batch_of(count=32):
    return torch.randn(count, 8), torch.randint(4, (count,))


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


class Loop:
    """A model, its optimizer, and backward on a batch."""

    def __init__(self, rule=CRAM_PLUS):
        self.model = net()
        base = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        operators = ["global:0.5", "global:0.8"]
        self.optimizer = CrAM(self.model, base, operators, rho=0.1, rule=rule)

    def backward(self, batch):
        self.optimizer.zero_grad()
        loss = loss_on(self.model, batch)
        loss.backward()
        return loss

    def by_closures(self, first, second):
        closures = partial(self.backward, first), partial(self.backward, second)
        assert self.optimizer.step(*closures).requires_grad

    def by_hand(self, first, second):
        self.backward(first)
        for _ in self.optimizer.rule.passes:
            with self.optimizer.compressed():
                self.backward(second)
        self.optimizer.step()


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM])
def test_a_step_by_two_closures_is_that_of_compressed(rule):
    ours, theirs = Loop(rule), Loop(rule)
    for _ in range(4):
        parts = split_batch(batch_of())
        ours.by_closures(*parts)
        theirs.by_hand(*parts)
    state = theirs.model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in ours.model.state_dict().items())


def test_statistics_are_those_of_the_dense_part():
    loop, twin = Loop(), net()
    first, second = split_batch(batch_of())
    loop.by_closures(first, second)
    twin(first[0])
    for name, value in twin.named_buffers():
        assert torch.equal(value, loop.model.get_buffer(name)), name


@pytest.mark.parametrize("rule", [CRAM_PLUS, C_SAM])
@pytest.mark.parametrize("shares", [(1, 0.5), (0.5, 0.5)])
def test_micro_batches_are_one_batch_with_the_same_parts(rule, shares):
    ours, theirs = Loop(rule), Loop(rule)
    for loop in (ours, theirs):
        loop.model.double()
        loop.model[1] = nn.Identity()  # statistics of batch norm are those of a micro-batch
    for _ in range(3):
        inputs, labels = batch_of()
        chunks = zip(inputs.double().chunk(4), labels.chunk(4), strict=True)
        passes = list(zip(*(split_batch(chunk, *shares) for chunk in chunks), strict=True))
        united = [[torch.cat(values) for values in zip(*parts, strict=True)] for parts in passes]
        theirs.by_hand(*united)
        for number, parts in enumerate((passes[0], *([passes[1]] * len(rule.passes)))):
            with ours.optimizer.compressed() if number else nullcontext():
                for part in parts:
                    (loss_on(ours.model, part) / 4).backward()
        ours.optimizer.step()
        ours.optimizer.zero_grad()
    torch.testing.assert_close(ours.model.state_dict(), theirs.model.state_dict())


def test_a_batch_that_cannot_be_split_changes_nothing():
    loop = Loop()
    before = {name: value.clone() for name, value in loop.model.state_dict().items()}
    with pytest.raises(ValueError, match="leave a pass without a sample"):
        loop.by_closures(*split_batch(batch_of(1)))
    assert all(torch.equal(before[name], v) for name, v in loop.model.state_dict().items())
    loop.by_closures(*split_batch(batch_of()))


def test_a_compressed_closure_needs_the_other():
    with pytest.raises(ValueError, match="needs a closure for the pass at w"):
        Loop().optimizer.step(None, lambda: None)
