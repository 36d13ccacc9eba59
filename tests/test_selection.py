"""Selection against a sort, over sizes, dtypes, ties and layouts."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram import selection
from torchcram.selection import count_kept, keep_largest, keep_largest_each

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
KINDS = ["distinct", "tied", "constant", "zeros", "wild"]


def by_sorting(tensors, keep):
    """The definition: sort all magnitudes, earlier positions first among equals, keep the first."""
    flat = torch.cat([tensor.reshape(-1).double().abs() for tensor in tensors])
    flat = torch.where(flat.isnan(), torch.inf, flat)
    mask = torch.zeros(flat.numel(), dtype=torch.bool)
    mask[torch.argsort(flat, descending=True, stable=True)[:keep]] = True
    parts = mask.split([t.numel() for t in tensors])
    return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]


def make(kind, shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "tied":
        x = (x * 2).round()
    elif kind == "constant":
        x = torch.full(shape, -0.3, dtype=torch.float64)
    elif kind == "zeros":
        x = x * (torch.rand(shape, generator=generator) > 0.6)
    elif kind == "wild":
        x = x * 10.0 ** torch.randint(-4, 4, shape, generator=generator)
    return x.to(dtype)


@st.composite
def tensor_lists(draw):
    dtype = draw(st.sampled_from(DTYPES))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4)
    )
    kind = draw(st.sampled_from(KINDS))
    seed = draw(st.integers(0, 1000))
    tensors = [make(kind, shape, dtype, seed + i) for i, shape in enumerate(shapes)]
    if draw(st.booleans()):
        tensors = [
            t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors
        ]
    return tensors


@settings(deadline=None, max_examples=200)
@given(tensor_lists(), st.floats(0, 1, exclude_max=True))
def test_exactly_the_largest_are_kept(tensors, sparsity):
    total = sum(t.numel() for t in tensors)
    keep = count_kept(total, sparsity)
    masks = keep_largest(tensors, keep)
    assert sum(int(mask.sum()) for mask in masks) == keep == total - round(sparsity * total)
    for mask, expected, tensor in zip(masks, by_sorting(tensors, keep), tensors, strict=True):
        assert mask.dtype == torch.bool
        assert mask.stride() == tensor.stride()
        assert torch.equal(mask, expected)


@settings(deadline=None, max_examples=60)
@given(tensor_lists(), st.floats(0, 1, exclude_max=True))
def test_each_tensor_by_itself(tensors, sparsity):
    keep = [count_kept(t.numel(), sparsity) for t in tensors]
    for mask, tensor, count in zip(keep_largest_each(tensors, keep), tensors, keep, strict=True):
        assert torch.equal(mask, by_sorting([tensor], count)[0])


def test_blocks_are_seamless(monkeypatch):
    monkeypatch.setattr(selection, "BLOCK", 7)
    tensors = [make("tied", (50,), torch.float32, 1), make("tied", (4, 11), torch.float32, 2)]
    for keep in range(0, 95, 5):
        expected = by_sorting(tensors, keep)
        assert all(map(torch.equal, keep_largest(tensors, keep), expected))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sample", [4, 64, 10_000])
def test_a_sample_changes_nothing(monkeypatch, kind, dtype, sample):
    monkeypatch.setattr(selection, "SMALL", 0)
    monkeypatch.setattr(selection, "SAMPLE", sample)
    tensors = [make(kind, shape, dtype, i) for i, shape in enumerate([(400,), (30, 21), (5,)])]
    for keep in (0, 1, 50, 500, 1034, 1035):
        assert all(map(torch.equal, keep_largest(tensors, keep), by_sorting(tensors, keep)))


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_sample_that_misleads_changes_nothing(monkeypatch, factor):
    monkeypatch.setattr(selection, "SMALL", 0)
    monkeypatch.setattr(selection, "SAMPLE", 100)
    x = torch.rand(10_000) + 1
    x[::100] *= factor  # what the sample sees is not what the rest is like
    for keep in (150, 5000, 9850):
        assert torch.equal(keep_largest([x], keep)[0], by_sorting([x], keep)[0])


def test_mixed_dtypes_are_compared_by_value():
    tensors = [make("distinct", (40,), dtype, i) for i, dtype in enumerate(DTYPES)]
    masks = keep_largest(tensors, 50)
    assert all(map(torch.equal, masks, by_sorting(tensors, 50)))


def test_infinity_and_nan_rank_above_all_numbers():
    x = torch.tensor([1.0, -torch.inf, 5.0, torch.nan, -0.0])
    assert keep_largest([x], 1)[0].tolist() == [False, False, False, True, False]
    assert keep_largest([x], 2)[0].tolist() == [False, True, False, True, False]


def test_counts_can_be_summed_over_processes():
    """Two threads stand for two processes that hold a part of the weights each."""
    parts = [
        make("distinct", (301,), torch.float32, 1),
        make("distinct", (57, 3), torch.float32, 2),
    ]
    meet = threading.Barrier(2)
    shared = [None, None]
    masks = [None, None]

    def process(rank):
        def reduce(counts):
            shared[rank] = counts.clone()
            meet.wait()
            counts.copy_(shared[0] + shared[1])
            meet.wait()

        masks[rank] = keep_largest([parts[rank]], 100, reduce=reduce)[0]

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, masks, by_sorting(parts, 100)))


def test_bad_input_is_refused():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="cannot keep 4 of 3"):
        keep_largest([x], 4)
    with pytest.raises(ValueError, match="cannot keep -1 of 3"):
        keep_largest_each([x], [-1])
    with pytest.raises(ValueError, match=r"torch\.int32.*allowed.*torch\.float32"):
        keep_largest([x.int()], 1)
    assert keep_largest([], 0) == []
