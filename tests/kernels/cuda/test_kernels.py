"""The CUDA kernels: interpreted on the CPU where there is no GPU, the real ones where there is."""

import pytest
import torch
from test_selection import KINDS, by_sorting, make

pytest.importorskip("triton")

from torchcram.kernels import cuda as _kernels
from torchcram.kernels.cuda import select
from torchcram.kernels.cuda.chunks import CHUNK
from torchcram.kernels.cuda.select import SAMPLE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(7, 5), (16, 12, 3, 3), (9001,), (1,), (4, 3, 2, 2, 2)]


def tensors_of(kind, dtype):
    tensors = [make(kind, shape, dtype, i) for i, shape in enumerate(SHAPES)]
    tensors[1] = tensors[1].to(memory_format=torch.channels_last)
    tensors[4] = tensors[4].to(memory_format=torch.channels_last_3d)
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_all_together(kind, dtype):
    tensors = tensors_of(kind, dtype)
    total = sum(t.numel() for t in tensors)
    there = [t.to(DEVICE) for t in tensors]
    for keep in (0, 1, total // 20, total // 2, total - 1, total):
        masks = _kernels.keep_largest(there, [keep], [0] * len(there))
        pruned = [t.clone() for t in there]
        again = _kernels.keep_largest(pruned, [keep], [0] * len(there), zero=True)
        for i, expected in enumerate(by_sorting(tensors, keep)):
            assert torch.equal(masks[i].cpu(), expected)
            assert torch.equal(again[i], masks[i])
            assert masks[i].stride() == tensors[i].stride()
            zeroed = tensors[i].masked_fill(~expected, 0)
            assert torch.equal(bits_of(pruned[i]), bits_of(zeroed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["distinct", "tied"])
def test_each_by_itself_and_in_groups(kind, dtype):
    tensors = tensors_of(kind, dtype)
    there = [t.to(DEVICE) for t in tensors]
    keep = [t.numel() // 3 for t in tensors]
    pruned = [t.clone() for t in there]
    masks = _kernels.keep_largest(pruned, keep, range(len(there)), zero=True)
    for mask, small, tensor, count in zip(masks, pruned, tensors, keep, strict=True):
        assert torch.equal(mask.cpu(), by_sorting([tensor], count)[0])
        assert torch.equal(small, tensor.to(DEVICE).masked_fill(~mask, 0))
    masks = _kernels.keep_largest(there, [100, 1000], [0, 0, 1, 1, 1])
    expected = by_sorting(tensors[:2], 100) + by_sorting(tensors[2:], 1000)
    assert all(torch.equal(mask.cpu(), other) for mask, other in zip(masks, expected, strict=True))


@pytest.mark.parametrize("where", ["above", "below"])
def test_a_sample_that_misleads_costs_passes_only(where):
    """The sampled places hold what the rest does not, so the first interval misses the k-th key."""
    size = 3 * CHUNK
    x = torch.rand(size) + 1
    index = torch.arange(SAMPLE.value)
    place = ((index * 2654435761 % 2**32) >> 8) % CHUNK
    seen = index * 3 // SAMPLE.value * CHUNK + place
    x[seen] = x[seen] * (1e-6 if where == "above" else 1e6)
    for keep in (200, size // 2, size - 200):
        mask = _kernels.keep_largest([x.to(DEVICE)], [keep], [0])[0]
        assert torch.equal(mask.cpu(), by_sorting([x], keep)[0])


@pytest.mark.parametrize("missing", [-500, 0, 1, 500])
def test_all_keys_are_kept_where_rounding_puts_the_rank_above_the_sample(missing, monkeypatch):
    """The kernel divides by the size of a segment, on a GPU with an error of two units."""
    addresses = select._addresses

    def smaller(*args, **options):
        table, words = addresses(*args, **options)
        words = words.clone()
        words[-table.segments.numel() :].view(-1, 3)[:, 2] -= missing
        return table, words

    monkeypatch.setattr(select, "_addresses", smaller)
    tensors = [torch.randn(96, 192, device=DEVICE) * 0.05 for _ in range(3)]
    for dropped in (0, 1, 50):
        keep = [t.numel() - dropped for t in tensors]
        masks = _kernels.keep_largest(tensors, keep, range(len(tensors)))
        for mask, tensor, count in zip(masks, tensors, keep, strict=True):
            assert torch.equal(mask.cpu(), by_sorting([tensor.cpu()], count)[0])


def test_unaligned_memory():
    base = make("tied", (3001,), torch.float32, 3).to(DEVICE)
    x = base[1:]
    mask = _kernels.keep_largest([x], [700], [0])[0]
    assert torch.equal(mask.cpu(), by_sorting([x.cpu()], 700)[0])
    _kernels.zero_unmasked_([x], [mask])
    assert int(base[1:].count_nonzero()) <= 700
    assert torch.equal(base[:1].cpu(), make("tied", (3001,), torch.float32, 3)[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zero_unmasked(dtype):
    tensors = [t.to(DEVICE) for t in tensors_of("wild", dtype)]
    tensors[0][0, 0] = torch.nan
    masks = [torch.rand_like(t.float()) > 0.5 for t in tensors]
    masks[0][0, 0] = False
    expected = [t.masked_fill(~mask, 0) for t, mask in zip(tensors, masks, strict=True)]
    _kernels.zero_unmasked_(tensors, masks)
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, other)
        assert not torch.signbit(tensor[tensor == 0]).any()


def bits_of(tensor):
    return tensor.cpu().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


def pairs_of(dtype):
    """Two lists of tensors, with signed zeros and numbers so small that some lose bits."""
    pairs = []
    for i in (0, 1):
        tensors = [t.to(DEVICE) for t in tensors_of("distinct", dtype)]
        tensors[2] = (tensors[2].float() * torch.finfo(dtype).tiny).to(dtype)  # subnormal sums
        tensors[2][:64] = -0.0
        tensors[0] = tensors[0] * (1 + i)
        pairs.append(tensors)
    pairs[1][2][32:96] = 0.0
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_combine(dtype):
    tensors, others = pairs_of(dtype)
    masks = [torch.rand_like(t, dtype=torch.float32) > 0.5 for t in tensors]
    masks[3] = None
    expected = [t.clone() for t in tensors]
    for tensor, mask in zip(expected, masks, strict=True):
        if mask is not None:
            tensor.masked_fill_(~mask, 0)
    torch._foreach_add_(expected, others, alpha=1.0)
    before = [t.clone() for t in others]
    bad = torch.zeros((), device=DEVICE)
    _kernels.combine_(tensors, others, masks, bad)
    for tensor, other in zip(tensors, expected, strict=True):
        if DEVICE == "cpu" and dtype == torch.bfloat16:  # the interpreter does not round
            torch.testing.assert_close(tensor, other, rtol=2**-7, atol=1e-37)
        else:
            assert torch.equal(bits_of(tensor), bits_of(other))
    assert all(torch.equal(t, other) for t, other in zip(others, before, strict=True))
    assert bad.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", [(0, 0), (2, 5000), (2, 9000), (3, 0)])
def test_combine_notices_what_is_not_finite(dtype, value, where):
    number, at = where
    tensors, others = pairs_of(dtype)
    masks = [torch.ones_like(t, dtype=torch.bool) for t in tensors]
    for side in (tensors, others):
        bad = torch.zeros((), device=DEVICE)
        given = [[t.clone() for t in group] for group in (tensors, others)]
        given[side is others][number].view(-1)[at] = value
        _kernels.combine_(*given, masks, bad)
        assert bad.item() == 1
    masks[number].view(-1)[at] = False  # a gradient that is masked does not count
    bad = torch.zeros((), device=DEVICE)
    tensors[number].view(-1)[at] = value
    _kernels.combine_(tensors, others, masks, bad)
    assert bad.item() == 0


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter
def test_combine_of_large_halves_overflows():
    tensors, others = ([torch.full((3,), 60000.0, device=DEVICE).half()] for _ in range(2))
    bad = torch.zeros((), device=DEVICE)
    _kernels.combine_(tensors, others, [None], bad)
    assert bad.item() == 1
    assert tensors[0].isinf().all()


def test_add_scaled():
    tensors, others = pairs_of(torch.float32)
    scale = torch.tensor(0.3, device=DEVICE)
    expected = [t.clone() for t in tensors]
    torch._foreach_add_(expected, torch._foreach_mul(others, scale))
    before = [t.clone() for t in others]
    _kernels.add_scaled_(tensors, others, scale)
    for tensor, other in zip(tensors, expected, strict=True):
        assert torch.equal(bits_of(tensor), bits_of(other))
    assert all(torch.equal(t, other) for t, other in zip(others, before, strict=True))


@pytest.mark.gpu
def test_what_can_be_combined():
    tensors, others = pairs_of(torch.float32)
    masks = [torch.ones_like(t, dtype=torch.bool) for t in tensors]
    assert _kernels.can_combine(tensors, others, masks)
    assert _kernels.can_combine(tensors, others, [None] * len(tensors))
    scale = torch.ones((), device=DEVICE)
    assert _kernels.can_add_scaled(tensors, others, scale)
    assert not _kernels.can_add_scaled(tensors, others, scale.cpu())
    assert not _kernels.can_add_scaled(tensors, others, scale.double())

    def refused(number, *, tensor=None, other=None, mask=None):
        given = [[*tensors], [*others], [*masks]]
        for group, value in zip(given, (tensor, other, mask), strict=True):
            if value is not None:
                group[number] = value
        return not _kernels.can_combine(*given)

    assert refused(0, tensor=tensors[0].double())
    assert refused(0, other=others[0].bfloat16())
    assert refused(0, other=others[0].t().contiguous().t())
    assert refused(1, other=others[1].contiguous())
    assert refused(1, mask=masks[1].contiguous())
    assert refused(2, tensor=tensors[2][:0])
    assert refused(3, mask=masks[3].cpu())
    assert refused(0, tensor=tensors[0].cpu(), other=others[0].cpu())
