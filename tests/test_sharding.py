"""Rows on several processes, which threads stand for here: blocks that a boundary cuts."""

import threading
import warnings

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram import NM, GlobalTopK, Quantize, UniformTopK
from torchcram.layers import Layout
from torchcram.sharding import Part, block_maxima, complete_blocks, is_sharded, local, part_of
from torchcram.weights import LayerWeights


class Thread:
    """What `Peers` does, among threads."""

    def __init__(self, rank, size, meet, shared):
        self.rank, self.size, self.group = rank, size, "all"
        self._meet, self._shared = meet, shared
        self.sent = 0

    def gather(self, tensor):
        self.sent += tensor.numel()
        self._shared[self.rank] = tensor.clone()
        self._meet.wait()
        found = torch.stack(self._shared)
        self._meet.wait()
        return found

    def add_up_(self, tensor):
        tensor.copy_(self.gather(tensor).sum(0))

    def maximum_(self, tensor):
        tensor.copy_(self.gather(tensor).amax(0))


def on_ranks(whole, size, function):
    """Calls `function(rows, part)` on every rank; returns what each gave."""
    meet, shared, given_back = threading.Barrier(size, timeout=20), [None] * size, [None] * size

    def process(rank):
        part = Part(whole.shape, Thread(rank, size, meet, shared))
        given_back[rank] = function(whole[part.here.start : part.here.stop].clone(), part)

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is not None for one in given_back)
    return given_back


def test_rows_are_those_that_chunk_gives():
    for count in range(20):
        for size in range(1, 7):
            rows = torch.arange(count)
            chunks = [chunk.tolist() for chunk in rows.chunk(size)] if count else []
            chunks += [[]] * (size - len(chunks))
            part = Part(rows.shape, Thread(0, size, None, None))
            assert [list(part.rows(rank)) for rank in range(size)] == chunks


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 6), st.integers(1, 6))
def test_blocks_are_completed_by_few_rows(block, blocks, size):
    whole = torch.randn(block * blocks, 3)

    def completed(rows, part):
        return (*complete_blocks(rows, part, block), part)

    for rows, before, part in on_ranks(whole, size, completed):
        here = part.here
        if here:
            start, stop = here.start // block * block, -(-here.stop // block) * block
            assert torch.equal(rows, whole[start:stop])
            assert before == here.start - start
        else:
            assert len(rows) == 0
        assert part.peers.sent <= 2 * (block - 1) * 3


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 7), st.integers(1, 6), st.integers(1, 6))
def test_maxima_of_blocks_are_those_of_the_whole(block, blocks, size):
    whole = torch.rand(block * blocks, 3)
    expected = whole.unflatten(0, (-1, block)).amax(1)
    for found in on_ranks(whole, size, lambda rows, part: block_maxima(rows, part, block)):
        assert torch.equal(found, expected)


OPERATORS = [NM(2, 4), NM(1, 3), Quantize(3), Quantize(4, 4), GlobalTopK(0.6), UniformTopK(0.3)]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(OPERATORS),
    st.integers(1, 3),
    st.sampled_from([3, 4, 8, 12]),
    st.integers(1, 6),
    st.booleans(),
)
def test_cut_inputs_are_compressed_as_the_whole(operator, groups, inputs, size, tied):
    warnings.simplefilter("ignore")
    whole = torch.randn(groups * inputs, 2, 2, 2)
    whole = (whole * 2).round() if tied else whole
    layouts = {"w": Layout(transposed=True, groups=groups)}
    alone = LayerWeights({"w": whole.clone()}, layouts)
    mask = operator.compress_(alone)

    def compressed(rows, part):
        weights = LayerWeights({"w": rows}, layouts, {"w": part})
        masks = operator.compress_(weights)
        return rows, torch.ones_like(rows) if masks is None else masks["w"]

    parts = on_ranks(whole, size, compressed)
    assert torch.equal(torch.cat([rows for rows, _ in parts]), alone["w"])
    if mask is not None:
        assert torch.equal(torch.cat([kept for _, kept in parts]), mask["w"])


FUSED = {
    "attention": ((3 * 4, 8), Layout(layers=3)),
    "experts": ((5, 4, 8), Layout(layers=5, stacked=True)),
    "transposed experts": ((5, 8, 4), Layout(layers=5, stacked=True, transposed=True)),
    "Conv1D": ((8, 12), Layout(transposed=True)),
}


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(sorted(FUSED)),
    st.sampled_from([*OPERATORS, Quantize(4, 8), NM(1, 8)]),
    st.integers(1, 6),
    st.booleans(),
)
def test_fused_layers_are_compressed_as_the_whole(kind, operator, size, tied):
    warnings.simplefilter("ignore")
    shape, layout = FUSED[kind]
    whole = torch.randn(shape)
    whole = (whole * 2).round() if tied else whole
    alone = LayerWeights({"w": whole.clone()}, {"w": layout})
    mask = operator.compress_(alone)

    def compressed(rows, part):
        masks = operator.compress_(LayerWeights({"w": rows}, {"w": layout}, {"w": part}))
        return rows, torch.ones_like(rows) if masks is None else masks["w"]

    parts = on_ranks(whole, size, compressed)
    assert torch.equal(torch.cat([rows for rows, _ in parts]), alone["w"])
    if mask is not None:
        assert torch.equal(torch.cat([kept for _, kept in parts]), mask["w"])


def test_plain_tensors_are_whole():
    weight = torch.zeros(3, 2)
    assert not is_sharded(weight)
    assert local(weight) is weight
    assert part_of("weight", weight) is None
    weights = LayerWeights({"weight": weight})
    assert weights.local() is weights
