"""The CUDA kernels: interpreted on the CPU where there is no GPU, the real ones where there is."""

import pytest
import torch
from test_selection import KINDS, by_sorting, make

pytest.importorskip("triton")

from torchcram.kernels import cuda as _kernels
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
        for mask, expected, tensor in zip(masks, by_sorting(tensors, keep), tensors, strict=True):
            assert torch.equal(mask.cpu(), expected)
            assert mask.stride() == tensor.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["distinct", "tied"])
def test_each_by_itself_and_in_groups(kind, dtype):
    tensors = tensors_of(kind, dtype)
    there = [t.to(DEVICE) for t in tensors]
    keep = [t.numel() // 3 for t in tensors]
    masks = _kernels.keep_largest(there, keep, range(len(there)))
    for mask, tensor, count in zip(masks, tensors, keep, strict=True):
        assert torch.equal(mask.cpu(), by_sorting([tensor], count)[0])
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
