"""Selection against a sort, over sizes, dtypes, ties and layouts."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram import selection
from torchcram.selection import (
    Shards,
    count_kept,
    keep_largest,
    keep_largest_,
    keep_largest_each,
)

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


def in_shards(tensors, cuts, select):
    """Calls `select(stretches, shards)` in threads that stand for processes; joins their masks."""
    size = len(cuts) + 1
    meet, shared, masks = threading.Barrier(size, timeout=20), [None] * size, [None] * size
    parts = [t.reshape(-1).tensor_split([int(c * t.numel()) for c in cuts]) for t in tensors]

    def process(rank):
        def add_up(counts):
            shared[rank] = counts.clone()
            meet.wait()
            counts.copy_(sum(shared))
            meet.wait()

        masks[rank] = select([part[rank] for part in parts], Shards(rank, size, add_up))

    threads = [threading.Thread(target=process, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    joined = [torch.cat(stretches) for stretches in zip(*masks, strict=True)]
    return [mask.view(tensor.shape) for mask, tensor in zip(joined, tensors, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cuts", [(0.5,), (0.0, 0.3), (0.25, 0.5, 1.0)], ids=str)
def test_stretches_on_several_processes_have_the_masks_of_the_whole(kind, cuts):
    """Some processes hold nothing of a tensor; a boundary may cut a run of ties."""
    tensors = [
        make(kind, s, torch.bfloat16, i) for i, s in enumerate([(57, 3), (301,), (1,), (8, 8)])
    ]
    total = sum(t.numel() for t in tensors)
    for keep in (0, 1, total // 3, total - 1, total):
        masks = in_shards(tensors, cuts, lambda t, s, k=keep: keep_largest(t, k, shards=s))
        assert all(map(torch.equal, masks, by_sorting(tensors, keep)))
    each = [t.numel() // 2 for t in tensors]
    masks = in_shards(tensors, cuts, lambda t, s: keep_largest_each(t, each, shards=s))
    for mask, tensor, count in zip(masks, tensors, each, strict=True):
        assert torch.equal(mask, by_sorting([tensor], count)[0])


def test_bad_input_is_refused():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="cannot keep 4 of 3"):
        keep_largest([x], 4)
    with pytest.raises(ValueError, match="cannot keep -1 of 3"):
        keep_largest_each([x], [-1])
    with pytest.raises(ValueError, match=r"torch\.int32.*allowed.*torch\.float32"):
        keep_largest([x.int()], 1)
    assert keep_largest([], 0) == []


@pytest.mark.parametrize("each", [False, True])
def test_what_processes_add_up_is_small_and_exact(each):
    sent = []
    tensors = [torch.randn(40, 50).bfloat16(), torch.randn(70).bfloat16()]

    def add_up(counts):
        sent.append(counts)

    shards = Shards(0, 512, add_up)
    if each:
        masks = keep_largest_each(tensors, [200, 7], shards=shards)
    else:
        masks = keep_largest(tensors, 207, shards=shards)
    assert sum(int(mask.sum()) for mask in masks) == 207
    assert {counts.dtype for counts in sent} == {torch.int64}  # floats would round large counts
    assert sum(counts.nbytes for counts in sent) < 20_000


@settings(deadline=None, max_examples=50)
@given(tensor_lists(), st.floats(0, 1, exclude_max=True))
def test_all_but_the_largest_are_zeroed(tensors, sparsity):
    keep = count_kept(sum(t.numel() for t in tensors), sparsity)
    pruned = [t.clone() for t in tensors]
    masks = keep_largest_(pruned, keep)
    for small, tensor, mask, expected in zip(
        pruned, tensors, masks, by_sorting(tensors, keep), strict=True
    ):
        assert torch.equal(mask, expected)
        assert torch.equal(small, tensor.masked_fill(~expected, 0))


@pytest.mark.parametrize("strided", [False, True], ids=["dense", "strided"])
def test_all_but_the_largest_are_zeroed_by_the_kernel(monkeypatch, strided):
    cuda = pytest.importorskip("torchcram.kernels.cuda")
    calls = []

    def select(*args, **options):
        calls.append(options)
        return cuda.keep_largest(*args, **options)

    monkeypatch.setattr(selection, "_kernel_for", lambda _: select)
    monkeypatch.setattr(selection, "cuda_kernels", lambda: cuda)
    tensors = [make("tied", (40, 7), torch.float32, seed) for seed in (0, 1)]
    pruned = [t.clone() for t in tensors]
    if strided:  # the kernel selects from a copy, which it must not zero instead
        pruned[0] = torch.cat([pruned[0], pruned[0]], dim=1)[:, :7]
    masks = keep_largest_(pruned, 100)
    for small, tensor, mask, expected in zip(
        pruned, tensors, masks, by_sorting(tensors, 100), strict=True
    ):
        assert torch.equal(mask, expected)
        assert torch.equal(small, tensor.masked_fill(~expected, 0))
    assert calls == ([{}] if strided else [{"zero": True}])
    with pytest.raises(ValueError, match="cannot keep 1000 of 560 values"):
        keep_largest_(pruned, 1000)
