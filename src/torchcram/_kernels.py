"""Triton kernels that treat a whole list of CUDA tensors in one launch.

A model has many weights, most of them small, so one launch per tensor would cost more than the work
itself. Every kernel here runs one program per *chunk* of one tensor and finds that tensor through a
table of addresses. Nothing waits for the host: counts, thresholds and masks stay on the device.

Selection walks down the bits of the magnitude. The key of a value is its bit pattern without the
sign; for floating point, larger magnitude means larger key, with infinities and NaN on top. Level
by level, from the highest bits, a histogram tells which bin holds the k-th largest key, until all
bits are known.

    rank     how many keys are still to be kept at or below the prefix (counted from the largest)
    prefix   the bits of the k-th largest key that are known so far
    segment  tensors with the same segment number are ranked together
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

CHUNK = 8192  # elements one program looks at
BINS = tl.constexpr(64)  # row length of the table of counts; no level uses more
LEVELS = {torch.float32: (6, 5, 5, 5, 5, 5), torch.bfloat16: (5, 5, 5), torch.float16: (5, 5, 5)}
KEYS = {torch.float32: tl.int32, torch.bfloat16: tl.int16, torch.float16: tl.int16}


class Layout(NamedTuple):
    """How a tensor lies in memory: `rows` of a (channels, spatial) block, stored spatial-first if spatial > 1."""

    numel: int
    channels: int
    spatial: int


class Table(NamedTuple):
    """Where the chunks of a list of tensors are; depends on shapes alone."""

    tensor: Tensor  # (chunks,) which tensor
    start: Tensor  # (chunks,) first element within it
    numel: Tensor  # (tensors,)
    channels: Tensor  # (tensors,)
    spatial: Tensor  # (tensors,)
    offset: Tensor  # (tensors,) where its mask begins in the flat mask
    segment: Tensor  # (tensors,)
    leader: Tensor  # (segments,) first chunk
    size: int  # of the flat mask
    offsets: tuple[int, ...]


def layout(tensor: Tensor) -> Layout | None:
    """Returns how `tensor` lies in memory, or None where the kernels cannot walk it."""
    if tensor.is_contiguous():
        return Layout(tensor.numel(), 1, 1)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    form = formats.get(tensor.dim())
    if form is not None and tensor.is_contiguous(memory_format=form):
        return Layout(tensor.numel(), tensor.shape[1], tensor[0, 0].numel())
    return None


def _to_device(values: Sequence[int], device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@functools.lru_cache(maxsize=32)
def _table(layouts: tuple[Layout, ...], segments: tuple[int, ...], device: torch.device) -> Table:
    tensor, start, offsets, leader, end = [], [], [], {}, 0
    for index, (lay, segment) in enumerate(zip(layouts, segments, strict=True)):
        leader.setdefault(segment, len(tensor))
        starts = range(0, lay.numel, CHUNK)
        tensor += [index] * len(starts)
        start += starts
        offsets.append(end)
        end += -(-lay.numel // 16) * 16  # masks begin at multiples of 16 bytes
    columns = [tensor, start, *zip(*layouts, strict=True), offsets, segments, leader.values()]
    rows = [_to_device(list(column), device) for column in columns]
    return Table(*rows, size=end, offsets=tuple(offsets))


@functools.lru_cache(maxsize=256)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    return _to_device(pointers, device)


def _locate(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Returns the addresses of `tensors` and whether all are multiples of 16 bytes."""
    pointers = tuple(tensor.data_ptr() for tensor in tensors)
    return _addresses(pointers, tensors[0].device), all(p % 16 == 0 for p in pointers)


@triton.jit
def _load(pointer, index, numel, start, SIZE: tl.constexpr):
    # whole chunks load without a mask, in vectors
    if start + SIZE <= numel:
        value = tl.load(pointer + index)
    else:
        value = tl.load(pointer + index, mask=index < numel, other=0)
    return value


@triton.jit
def _chunk(tensor_of, start_of, numel_of, addresses, KEY: tl.constexpr, ALIGNED: tl.constexpr):
    chunk = tl.program_id(0)
    tensor = tl.load(tensor_of + chunk)
    start = tl.load(start_of + chunk)
    numel = tl.load(numel_of + tensor)
    pointer = tl.load(addresses + tensor).to(tl.pointer_type(KEY))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return tensor, tl.multiple_of(start, 16), numel, pointer


@triton.jit
def _magnitude(bits, SIGN: tl.constexpr):
    return bits.to(tl.int32) & SIGN


@triton.jit
def _descend(counts, rank, prefix, WIDTH: tl.constexpr):
    # the highest bin at or above which at least `rank` keys lie
    bins = tl.arange(0, 1 << WIDTH)
    count = tl.load(counts + bins)
    at_or_above = tl.sum(count) - tl.cumsum(count, 0) + count
    here = tl.sum((at_or_above >= rank).to(tl.int32)) - 1
    above = tl.sum(tl.where(bins > here, count, 0))
    ties = tl.sum(tl.where(bins == here, count, 0))
    return (prefix << WIDTH) | here, rank - above, ties


@triton.jit
def _enter(state, counts, segment, segments, LEVEL: tl.constexpr, WIDTH: tl.constexpr):
    # (prefix, rank, ties) as the counts of the level before say
    before = state + ((LEVEL - 1) * segments + segment) * 2
    rank = tl.load(before)
    prefix = tl.load(before + 1).to(tl.int32)
    return _descend(counts + ((LEVEL - 1) * segments + segment) * BINS, rank, prefix, WIDTH)


@triton.jit
def _count_kernel(
    tensor_of, start_of, numel_of, segment_of, leader_of, addresses, state, counts, segments,
    LEVEL: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BEFORE: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Counts, per segment, the keys below the known prefix by their next WIDTH bits."""
    tensor, start, numel, pointer = _chunk(tensor_of, start_of, numel_of, addresses, KEY, ALIGNED)
    segment = tl.load(segment_of + tensor)
    index = start + tl.arange(0, SIZE)
    key = _magnitude(_load(pointer, index, numel, start, SIZE), SIGN)
    counted = index < numel
    if LEVEL > 0:
        prefix, rank, _ = _enter(state, counts, segment, segments, LEVEL, BEFORE)
        counted = counted & ((key >> (SHIFT + WIDTH)) == prefix)
        if tl.load(leader_of + segment) == tl.program_id(0):
            here = state + (LEVEL * segments + segment) * 2
            tl.store(here, rank)
            tl.store(here + 1, prefix.to(tl.int64))
    bins = (key >> SHIFT) & ((1 << WIDTH) - 1)
    count = tl.histogram(bins, 1 << WIDTH, mask=counted)
    out = counts + (LEVEL * segments + segment) * BINS + tl.arange(0, 1 << WIDTH)
    tl.atomic_add(out, count.to(tl.int64), mask=count > 0)


@triton.jit
def _in_order(index, channels, spatial):
    # where the index-th element (in row-major order) lies in a channels-last tensor
    row = index // (channels * spatial)
    rest = index - row * channels * spatial
    channel = rest // spatial
    return row * channels * spatial + (rest - channel * spatial) * channels + channel


@triton.jit
def _ties_kernel(
    tensor_of, start_of, numel_of, channels_of, spatial_of, segment_of, addresses, state, counts,
    found, segments, LEVEL: tl.constexpr, BEFORE: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Counts the keys equal to the k-th in each chunk, where not all of them are kept."""
    tensor, start, numel, pointer = _chunk(tensor_of, start_of, numel_of, addresses, KEY, ALIGNED)
    segment = tl.load(segment_of + tensor)
    prefix, rank, ties = _enter(state, counts, segment, segments, LEVEL, BEFORE)
    if rank < ties:
        index = start + tl.arange(0, SIZE)
        place = _in_order(index, tl.load(channels_of + tensor), tl.load(spatial_of + tensor))
        key = _magnitude(tl.load(pointer + place, mask=index < numel, other=0), SIGN)
        tied = (key == prefix) & (index < numel)
        tl.store(found + tl.program_id(0), tl.sum(tied.to(tl.int32)))


@triton.jit
def _mask_kernel(
    tensor_of, start_of, numel_of, channels_of, spatial_of, segment_of, leader_of, offset_of,
    addresses, state, counts, found, mask, segments, LEVEL: tl.constexpr, BEFORE: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes True where a key is above the k-th, and for the first `rank` of those equal to it."""
    tensor, start, numel, pointer = _chunk(tensor_of, start_of, numel_of, addresses, KEY, ALIGNED)
    segment = tl.load(segment_of + tensor)
    out = mask + tl.multiple_of(tl.load(offset_of + tensor), 16)
    prefix, rank, ties = _enter(state, counts, segment, segments, LEVEL, BEFORE)
    index = start + tl.arange(0, SIZE)
    if rank < ties:
        # position decides: ties in earlier chunks of the segment come first
        chunk = tl.program_id(0)
        earlier = tl.zeros([], tl.int64)
        first = tl.load(leader_of + segment)
        for at in range(first, chunk, SIZE):
            where = at + tl.arange(0, SIZE)
            earlier += tl.sum(tl.load(found + where, mask=where < chunk, other=0)).to(tl.int64)
        place = _in_order(index, tl.load(channels_of + tensor), tl.load(spatial_of + tensor))
        key = _magnitude(tl.load(pointer + place, mask=index < numel, other=0), SIGN)
        tied = (key == prefix) & (index < numel)
        order = earlier + tl.cumsum(tied.to(tl.int32), 0)
        keep = (key > prefix) | (tied & (order <= rank))
        tl.store(out + place, keep.to(tl.uint8), mask=index < numel)
    else:
        key = _magnitude(_load(pointer, index, numel, start, SIZE), SIGN)
        keep = (key >= prefix).to(tl.uint8)
        if start + SIZE <= numel:
            tl.store(out + index, keep)
        else:
            tl.store(out + index, keep, mask=index < numel)


@triton.jit
def _zero_kernel(
    tensor_of, start_of, numel_of, addresses, masks, KEY: tl.constexpr, ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Writes +0 wherever the mask is False, and touches nothing else."""
    tensor, start, numel, pointer = _chunk(tensor_of, start_of, numel_of, addresses, KEY, ALIGNED)
    kept = tl.load(masks + tensor).to(tl.pointer_type(tl.int8))
    if ALIGNED:
        kept = tl.multiple_of(kept, 16)
    index = start + tl.arange(0, SIZE)
    drop = _load(kept, index, numel, start, SIZE) == 0
    tl.store(pointer + index, tl.zeros([SIZE], KEY), mask=drop & (index < numel))


def keep_largest(
    tensors: Sequence[Tensor],
    keep: Sequence[int],
    segments: Sequence[int],
    reduce: Callable[[Tensor], None] | None = None,
) -> list[Tensor]:
    """Masks that keep, in each segment, exactly the `keep[segment]` largest magnitudes.

    Args:
        tensors: of one dtype out of `LEVELS`, on one device, each with a `layout`.
        keep: how many to keep, per segment.
        segments: the segment of each tensor; the tensors of a segment follow one another.
        reduce: sums a tensor of counts over processes, in place.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    layouts = tuple(lay for tensor in tensors if (lay := layout(tensor)) is not None)
    table = _table(layouts, tuple(segments), device)
    addresses, aligned = _locate(tensors)
    widths, groups = LEVELS[dtype], len(keep)
    bits = sum(widths)
    grid = (len(table.tensor),)
    fixed = {"KEY": KEYS[dtype], "SIGN": (1 << bits) - 1, "ALIGNED": aligned, "SIZE": CHUNK}
    fixed |= {"num_warps": 8}

    counts = torch.zeros(len(widths), groups, BINS.value, dtype=torch.int64, device=device)
    state = torch.zeros(len(widths), groups, 2, dtype=torch.int64, device=device)  # rank, prefix
    state[0, :, 0] = _addresses(tuple(keep), device)
    shift, before = bits, 0
    for level, width in enumerate(widths):
        shift -= width
        _count_kernel[grid](
            table.tensor, table.start, table.numel, table.segment, table.leader, addresses,
            state, counts, groups, level, shift, width, before, **fixed,
        )  # fmt: skip
        before = width
        if reduce is not None:
            reduce(counts[level])

    found = torch.empty(grid, dtype=torch.int32, device=device)
    _ties_kernel[grid](
        table.tensor, table.start, table.numel, table.channels, table.spatial, table.segment,
        addresses, state, counts, found, groups, len(widths), before, **fixed,
    )  # fmt: skip
    mask = torch.empty(table.size, dtype=torch.bool, device=device)
    _mask_kernel[grid](
        table.tensor, table.start, table.numel, table.channels, table.spatial, table.segment,
        table.leader, table.offset, addresses, state, counts, found, mask.view(torch.uint8),
        groups, len(widths), before, **fixed,
    )  # fmt: skip
    return [
        mask.as_strided(tensor.shape, tensor.stride(), offset)
        for tensor, offset in zip(tensors, table.offsets, strict=True)
    ]


def zero_unmasked_(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zeroes every tensor where its mask is False; masks lie in memory as their tensors do."""
    layouts = tuple(Layout(tensor.numel(), 1, 1) for tensor in tensors)
    table = _table(layouts, (0,) * len(tensors), tensors[0].device)
    addresses, aligned = _locate(tensors)
    kept, kept_aligned = _locate(masks)
    _zero_kernel[(len(table.tensor),)](
        table.tensor, table.start, table.numel, addresses, kept, KEYS[tensors[0].dtype],
        aligned and kept_aligned, CHUNK, num_warps=8,
    )  # fmt: skip
