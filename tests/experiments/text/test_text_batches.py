from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram.experiments.data.images import Shard
from torchcram.experiments.data.text.batches import LENGTHS, TextBatches, padding, rounded
from torchcram.experiments.data.text.datasets import Texts

CPU = torch.device("cpu")


def texts(lengths):
    """Sequences whose tokens are all their own number and one."""
    counts = torch.tensor(lengths)
    numbers = torch.arange(len(lengths)).repeat_interleave(counts)
    return Texts(
        tokens=(numbers + 1).int(),
        kinds=torch.full((len(numbers),), 2, dtype=torch.uint8),
        ends=counts.cumsum(0),
        labels=torch.arange(len(lengths)),
        examples=torch.arange(len(lengths)),
        offsets=torch.zeros(0, 2, dtype=torch.int32),
    )


def batches(lengths, batch_size=4, seed=0, train=True, **options):
    return TextBatches(
        texts(lengths), batch_size=batch_size, device=CPU, seed=seed, train=train, **options
    )


sizes = st.lists(st.integers(1, 700), min_size=1, max_size=60)


@settings(deadline=None)
@given(sizes, st.integers(1, 9), st.booleans())
def test_every_batch_holds_whole_sequences_of_about_one_length(lengths, size, train):
    given = batches(lengths, size, train=train)
    seen = []
    for inputs, labels in given.epoch(1):
        assert inputs.dtype == torch.int32
        count, two, length = inputs.shape
        assert two == 2
        assert count == given.batch_size or not train
        assert length in LENGTHS or length == max(lengths)
        for (tokens, kinds), label in zip(inputs, labels.tolist(), strict=True):
            assert tokens[: lengths[label]].eq(label + 1).all()
            assert kinds[: lengths[label]].eq(2).all()
            assert not tokens[lengths[label] :].any()
            assert not kinds[lengths[label] :].any()
        seen += labels.tolist()
    assert len(seen) == len(set(seen))
    expected = len(lengths) // given.batch_size * given.batch_size if train else len(lengths)
    assert len(seen) == expected
    assert 0 <= given.padding < 1


def test_the_order_is_of_the_seed_and_the_epoch():
    lengths = [5, 60, 61, 9, 7, 300, 310, 20] * 8

    def order(seed, epoch):
        return [labels.tolist() for _, labels in batches(lengths, seed=seed).epoch(epoch)]

    assert order(0, 2) == order(0, 2)
    assert len({str(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    given = batches(lengths)
    first = [labels.tolist() for _, labels in given.epoch(2)]
    assert first == order(0, 2)  # whatever epoch came before
    assert sorted(given.lengths) == sorted(batches(lengths, seed=5).lengths)


def test_little_is_padding_where_lengths_differ():
    lengths = [12] * 40 + [120] * 40 + [380] * 40
    assert padding(texts(lengths), 8) < 0.08
    assert padding(texts([3, 400]), 2) == pytest.approx(1 - 403 / 800)


def test_lengths_are_rounded_to_few_and_never_beyond_the_longest():
    found = rounded(torch.tensor([1, 8, 9, 65, 193, 400]))
    assert found.tolist() == [8, 8, 16, 96, 256, 400]
    assert rounded(torch.tensor([40_000])).tolist() == [40_000]


def test_parts_make_up_the_whole():
    lengths = [5, 9, 300, 70, 71, 72, 6, 8, 310, 11]
    whole = [labels.tolist() for _, labels in batches(lengths, 5).epoch(3)]
    parts = [batches(lengths, 5, shard=Shard(number, 2)) for number in range(2)]
    shared = [
        one.tolist() + other.tolist()
        for (_, one), (_, other) in zip(parts[0].epoch(3), parts[1].epoch(3), strict=True)
    ]
    assert shared == whole
    tested = [
        label
        for number in range(3)
        for _, labels in batches(lengths, train=False, shard=Shard(number, 3)).epoch(0)
        for label in labels.tolist()
    ]
    assert sorted(tested) == list(range(10))
    with pytest.raises(ValueError, match="cannot be divided into 9 parts"):
        batches(lengths, 5, shard=Shard(0, 9))


def test_nothing_makes_no_batch():
    with pytest.raises(ValueError, match="batch size 0 of 1"):
        batches([3], 0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 700), min_size=12, max_size=60), st.integers(1, 4))
def test_parts_make_up_an_epoch(lengths, parts):
    whole = batches(lengths, 3)
    given = TextBatches(
        replace(texts(lengths), parts=parts), batch_size=3, device=CPU, seed=0, train=True
    )
    examples = given.of_every_length()
    for epoch in (0, 2):
        wanted = [labels.tolist() for _, labels in whole.epoch(epoch)]
        assert {inputs.shape[2] for inputs, _ in whole.epoch(epoch)} == set(examples)
        found = []
        for part in range(parts):
            mine = [labels.tolist() for _, labels in given.epoch(parts * epoch + part)]
            assert len(mine) == len(given) == len(wanted) // parts
            found += mine
        assert found == wanted[: len(found)]
    for length, places in examples.items():
        assert given.at(places, length)[0].shape == (3, 2, length)


def test_more_parts_than_batches_are_refused():
    with pytest.raises(ValueError, match="2 batches do not make 3 parts"):
        TextBatches(replace(texts([5] * 8), parts=3), batch_size=4, device=CPU, seed=0, train=True)
