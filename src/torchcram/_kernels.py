"""Triton kernels that treat a whole list of CUDA tensors in one launch.

A model has many weights, most of them small, so one launch per tensor would cost more than the work
itself. Every kernel here runs one program per chunk of one tensor and finds it through a table of
addresses. Nothing waits for the host: counts, thresholds and masks stay on the device.

Selection walks down the bits of the magnitude. The key of a value is its bit pattern without the
sign; for floating point, larger magnitude means larger key, with infinities and NaN on top. Level
by level, from the highest bits, counts tell which bin holds the k-th largest key, until all bits
are known.

    segment  tensors with the same segment number are ranked together
    prefix   the bits of the k-th largest key of a segment that are known so far
    rank     how many keys that begin with the prefix are to be kept
    ties     how many keys equal the k-th, once all its bits are known
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

CHUNK = 4096  # elements one program looks at
WARPS = 4  # that share them
COPIES = 32  # of the counts, so that programs seldom add to the same place at the same time
# Bits per level. The first takes in the exponent and some of the fraction: with fewer bits, all
# threads would add to the same few bins.
LEVELS = {torch.float32: (11, 10, 10), torch.bfloat16: (11, 4), torch.float16: (11, 4)}
KEYS = {torch.float32: tl.int32, torch.bfloat16: tl.int16, torch.float16: tl.int16}
STATE = tl.constexpr(4)  # prefix, rank, ties, unused
INFO = tl.constexpr(9)  # columns of the table of tensors, below


class Layout(NamedTuple):
    """How a tensor lies in memory: rows of (channels, spatial), stored as (spatial, channels)."""

    numel: int
    channels: int = 1
    spatial: int = 1


class Table(NamedTuple):
    """Where the chunks of a list of tensors are.

    The rows of `info` hold: numel, channels, spatial, the offset of the mask, the segment, the
    first chunk, the chunk after the last, the first chunk of the segment and how many it has.
    """

    chunks: Tensor  # (chunks, 2): tensor, first element
    info: Tensor  # (tensors, INFO)
    offsets: tuple[int, ...]  # where the mask of each tensor begins in the flat mask
    size: int  # of the flat mask


def layout(tensor: Tensor) -> Layout | None:
    """Returns how `tensor` lies in memory, or None where the kernels cannot walk it."""
    if tensor.is_contiguous():
        return Layout(tensor.numel())
    form = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if form is not None and tensor.is_contiguous(memory_format=form):
        return Layout(tensor.numel(), tensor.shape[1], tensor[0, 0].numel())
    return None


def walk_alike(tensor: Tensor, mask: Tensor) -> bool:
    """Returns whether `zero_unmasked_` can walk `tensor` and `mask` side by side."""
    if not mask.is_cuda or tensor.dtype not in KEYS:
        return False
    if tensor.is_contiguous():
        return mask.is_contiguous()
    return tensor.stride() == mask.stride() and layout(tensor) is not None


def _layouts(tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    return tuple([layout(tensor) or Layout(tensor.numel()) for tensor in tensors])


def _to_device(values: Sequence[object], device: torch.device) -> Tensor:
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@functools.lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    return _to_device(values, device)


@functools.lru_cache(maxsize=64)
def _table(
    layouts: tuple[Layout, ...], segments: tuple[int, ...], device: torch.device, chunk: int
) -> Table:
    chunks: list[tuple[int, int]] = []
    leaders: dict[int, int] = {}
    info, size = [], 0
    for index, (lay, segment) in enumerate(zip(layouts, segments, strict=True)):
        first = len(chunks)
        chunks += [(index, start) for start in range(0, lay.numel, chunk)]
        leader = leaders.setdefault(segment, first)
        info.append((*lay, size, segment, first, len(chunks), leader))
        size += -(-lay.numel // 16) * 16  # masks begin at multiples of 16 bytes
    ends = {row[4]: row[6] for row in info}  # of the segments
    info = [(*row, ends[row[4]] - row[7]) for row in info]
    rows = _to_device(chunks, device).view(-1, 2)
    return Table(rows, _to_device(info, device), tuple(row[3] for row in info), size)


def _locate(tensors: Sequence[Tensor]) -> tuple[Tensor, bool]:
    """Returns the addresses of `tensors`, and whether all are multiples of 16 bytes."""
    pointers = tuple(tensor.data_ptr() for tensor in tensors)
    return _on_device(pointers, tensors[0].device), not any(p % 16 for p in pointers)


@triton.jit
def _chunk(chunks, info, addresses, KEY: tl.constexpr, ALIGNED: tl.constexpr):
    # (row of info, first element, elements up to the end of the tensor, address of the first)
    row = chunks + tl.program_id(0) * 2
    tensor = tl.load(row)
    start = tl.multiple_of(tl.load(row + 1), 16)
    about = info + tensor * INFO
    base = tl.load(addresses + tensor).to(tl.pointer_type(KEY))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    return about, start, tl.load(about) - start, base + start


@triton.jit
def _keys(pointer, place, left, SIGN: tl.constexpr, SIZE: tl.constexpr):
    # a whole chunk loads without a mask, in vectors
    if left >= SIZE:
        bits = tl.load(pointer + place)
    else:
        bits = tl.load(pointer + place, mask=place < left, other=0)
    return bits.to(tl.int32) & SIGN


@triton.jit
def _descend(counts, keep, state, segment, LEVEL: tl.constexpr, WIDTH: tl.constexpr,
             COPIES: tl.constexpr):  # fmt: skip
    # takes the highest bin at or above which at least `rank` keys lie into the prefix
    bins: tl.constexpr = 1 << WIDTH
    place = tl.arange(0, bins)
    count = tl.zeros([bins], tl.int64)
    for copy in tl.static_range(COPIES):
        at = counts + (segment * COPIES + copy) * bins + place
        count += tl.load(at, cache_modifier=".cg").to(tl.int64)
    here = state + segment * STATE
    if LEVEL == 0:
        prefix = tl.zeros([], tl.int64)
        rank = tl.load(keep + segment)
    else:
        prefix = tl.load(here)
        rank = tl.load(here + 1)
    at_or_above = tl.sum(count) - tl.cumsum(count, 0) + count
    chosen = tl.sum((at_or_above >= rank).to(tl.int32)) - 1
    tl.store(here, (prefix << WIDTH) | chosen)
    tl.store(here + 1, rank - tl.sum(tl.where(place > chosen, count, 0)))
    tl.store(here + 2, tl.sum(tl.where(place == chosen, count, 0)))


@triton.jit
def _descend_kernel(counts, keep, state, LEVEL: tl.constexpr, WIDTH: tl.constexpr,
                    COPIES: tl.constexpr):  # fmt: skip
    """Adds the bits that the counts of one level tell to the prefix of each segment."""
    _descend(counts, keep, state, tl.program_id(0), LEVEL, WIDTH, COPIES)


@triton.jit
def _count_kernel(
    chunks, info, addresses, state, counts, keep, done,
    LEVEL: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, COPIES: tl.constexpr,
    ALONE: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Counts, per segment, the keys that begin with the prefix by their next WIDTH bits.

    Where no other process has counts to add, the last program of a segment also descends.
    """
    about, _, left, pointer = _chunk(chunks, info, addresses, KEY, ALIGNED)
    segment = tl.load(about + 4)
    place = tl.arange(0, SIZE)
    key = _keys(pointer, place, left, SIGN, SIZE)
    counted = place < left
    if LEVEL > 0:
        prefix = tl.load(state + segment * STATE).to(tl.int32)
        counted = counted & ((key >> (SHIFT + WIDTH)) == prefix)
    bins: tl.constexpr = 1 << WIDTH
    copy = tl.program_id(0) % COPIES
    bin_of = counts + (segment * COPIES + copy) * bins + ((key >> SHIFT) & (bins - 1))
    tl.atomic_add(bin_of, 1, mask=counted, sem="relaxed")
    if ALONE:
        tl.debug_barrier()  # all threads have counted
        finished = tl.atomic_add(done + segment, 1, sem="acq_rel") + 1
        if finished == tl.load(about + 8):
            _descend(counts, keep, state, segment, LEVEL, WIDTH, COPIES)


@triton.jit
def _in_order(index, channels, spatial):
    # where the index-th element in row-major order lies in memory
    row = index // (channels * spatial)
    rest = index - row * channels * spatial
    channel = rest // spatial
    return row * channels * spatial + (rest - channel * spatial) * channels + channel


@triton.jit
def _keys_in_order(about, start, left, pointer, SIGN: tl.constexpr, SIZE: tl.constexpr):
    # the keys of a chunk in row-major order, and their places relative to `pointer`
    place = tl.arange(0, SIZE)
    spatial = tl.load(about + 2)
    where = place.to(tl.int64)
    if spatial > 1:
        where = _in_order(start + place, tl.load(about + 1), spatial) - start
    bits = tl.load(pointer + where, mask=place < left, other=0)
    return bits.to(tl.int32) & SIGN, where


@triton.jit
def _ties_kernel(
    chunks, info, addresses, state, found,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Counts the keys equal to the k-th in each chunk, where not all of them are kept."""
    about, start, left, pointer = _chunk(chunks, info, addresses, KEY, ALIGNED)
    here = state + tl.load(about + 4) * STATE
    if tl.load(here + 1) < tl.load(here + 2):
        key, _ = _keys_in_order(about, start, left, pointer, SIGN, SIZE)
        tied = (key == tl.load(here).to(tl.int32)) & (tl.arange(0, SIZE) < left)
        tl.store(found + 1 + tl.program_id(0), tl.sum(tied.to(tl.int32)))


@triton.jit
def _mask_kernel(
    chunks, info, addresses, state, before, mask,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes True where a key is above the k-th, and for the first `rank` of those equal to it."""
    about, start, left, pointer = _chunk(chunks, info, addresses, KEY, ALIGNED)
    here = state + tl.load(about + 4) * STATE
    prefix = tl.load(here).to(tl.int32)
    rank = tl.load(here + 1)
    out = mask + tl.multiple_of(tl.load(about + 3), 16) + start
    place = tl.arange(0, SIZE)
    threshold = prefix
    partly = False
    if rank < tl.load(here + 2):
        # position decides: which of the ties of this tensor come first in the segment?
        leader = tl.load(before + tl.load(about + 7))
        earlier = tl.load(before + tl.load(about + 5)) - leader
        until = tl.load(before + tl.load(about + 6)) - leader
        partly = (earlier < rank) & (rank < until)
        threshold += (earlier >= rank).to(tl.int32)
        if partly:
            key, where = _keys_in_order(about, start, left, pointer, SIGN, SIZE)
            tied = (key == prefix) & (place < left)
            order = tl.load(before + tl.program_id(0)) - leader + tl.cumsum(tied.to(tl.int32), 0)
            first = (key > prefix) | (tied & (order <= rank))
            tl.store(out + where, first.to(tl.uint8), mask=place < left)
    if not partly:
        keep = (_keys(pointer, place, left, SIGN, SIZE) >= threshold).to(tl.uint8)
        if left >= SIZE:
            tl.store(out + place, keep)
        else:
            tl.store(out + place, keep, mask=place < left)


@triton.jit
def _zero_kernel(
    chunks, info, addresses, masks,
    KEY: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes +0 wherever the mask is False."""
    _, start, left, pointer = _chunk(chunks, info, addresses, KEY, ALIGNED)
    kept = tl.load(masks + tl.load(chunks + tl.program_id(0) * 2)).to(tl.pointer_type(tl.int8))
    if ALIGNED:
        kept = tl.multiple_of(kept, 16)
    place = tl.arange(0, SIZE)
    keep = _keys(kept + start, place, left, 1, SIZE) != 0
    if left >= SIZE:
        bits = tl.load(pointer + place)
        tl.store(pointer + place, tl.where(keep, bits, 0))
    else:
        tl.store(pointer + place, tl.zeros([SIZE], KEY), mask=(place < left) & ~keep)


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
        segments: the segment of each tensor, from 0 up; those of a segment follow one another.
        reduce: sums a tensor of counts over processes, in place.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    table = _table(_layouts(tensors), tuple(segments), device, CHUNK)
    addresses, aligned = _locate(tensors)
    widths = LEVELS[dtype]
    shift = sum(widths)
    programs, groups = len(table.chunks), len(keep)
    copies = max(COPIES // groups, 1)
    where = (table.chunks, table.info, addresses)
    fixed = (KEYS[dtype], (1 << shift) - 1, aligned, CHUNK)

    sizes = [groups * copies << width for width in widths]
    sizes += [groups] * len(widths) + [programs + 1]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    state = torch.empty(groups, STATE.value, dtype=torch.int64, device=device)
    wanted = _on_device(tuple(keep), device)
    for level, width in enumerate(widths):
        shift -= width
        counts, done = zeros[level], zeros[len(widths) + level]
        _count_kernel[programs,](
            *where, state, counts, wanted, done, level, shift, width, copies, reduce is None,
            *fixed, num_warps=WARPS,
        )  # fmt: skip
        if reduce is not None:
            reduce(counts)
            _descend_kernel[groups,](counts, wanted, state, level, width, copies)

    found = zeros[-1]
    _ties_kernel[programs,](*where, state, found, *fixed, num_warps=WARPS)
    before = found.cumsum(0)  # ties in earlier chunks
    mask = torch.empty(table.size, dtype=torch.bool, device=device)
    _mask_kernel[programs,](*where, state, before, mask, *fixed, num_warps=WARPS)
    return [
        mask.as_strided(tensor.shape, tensor.stride(), offset)
        for tensor, offset in zip(tensors, table.offsets, strict=True)
    ]


def zero_unmasked_(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zeroes every tensor where its mask is False.

    Args:
        tensors: of one dtype out of `KEYS`, on one device, each filling one stretch of memory.
        masks: with the strides of their tensors.
    """
    device = tensors[0].device
    flat = tuple([Layout(tensor.numel()) for tensor in tensors])
    table = _table(flat, (0,) * len(tensors), device, CHUNK)
    addresses, aligned = _locate(tensors)
    kept, kept_aligned = _locate(masks)
    _zero_kernel[len(table.chunks),](
        table.chunks, table.info, addresses, kept,
        KEYS[tensors[0].dtype], aligned and kept_aligned, CHUNK, num_warps=WARPS,
    )  # fmt: skip
