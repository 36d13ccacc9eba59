"""Triton kernels that treat a whole list of CUDA tensors in one launch.

A model has many weights, most of them small, so one launch per tensor would cost more than the work
itself. Every kernel here runs one program per chunk of one tensor and finds it through a table of
addresses. Nothing waits for the host: counts, thresholds and masks stay on the device.

Selection is one launch as well. The key of a value is its bit pattern without the sign; for
floating point, larger magnitude means larger key, with infinities and NaN on top. A sample of the
keys tells about where the k-th largest is, as an interval. Then passes over all keys follow, each
counting the keys of the interval in BINS bins and going on with the bin that holds the k-th, until
bins are one key wide. A sample that misleads costs further passes and nothing else. The programs
wait for one another between passes, which a cooperative launch makes safe.

    segment  tensors with the same segment number are ranked together
    rank     how many keys of the interval are to be kept
    ties     how many keys equal the k-th
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch._utils import _unflatten_dense_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CHUNK = 4096  # elements treated at a time
WARPS = 4  # that share them
PROGRAMS = 4  # per multiprocessor, at the same time
REGISTERS = 128  # per thread, so that these fit
BINS = tl.constexpr(2048)
SAMPLE = tl.constexpr(4096)
PASSES = tl.constexpr(4)  # enough for any key: BINS ** 3 > 2 ** 31, and one if the sample misleads
KEYS = {torch.float32: tl.int32, torch.bfloat16: tl.int16, torch.float16: tl.int16}
COPIES = 8  # of the counts, so that programs seldom add to the same place at the same time
ROW = tl.constexpr(5)  # columns of the rows of chunks
INFO = tl.constexpr(5)  # columns of Table.info
SEGMENT = tl.constexpr(4)  # columns of Table.segments
STATE = tl.constexpr(8)  # of a segment: low, last, shift, rank, ties, known, guess, above


class Layout(NamedTuple):
    """How a tensor lies in memory: rows of (channels, spatial), stored as (spatial, channels)."""

    numel: int
    channels: int = 1
    spatial: int = 1


class Table(NamedTuple):
    """Where the chunks of a list of tensors are, and what is ranked together.

    A row of `chunks` holds: the address of its first element (as an offset within the tensor, before
    `_rows` adds the address of that), the elements from there to the end of the tensor, the offset
    of the mask, the segment, the tensor.
    """

    chunks: Tensor  # (chunks + 1, ROW); the last row is there to be read ahead
    info: Tensor  # (tensors, INFO): numel, channels, spatial, first chunk, last chunk
    segments: Tensor  # (segments, SEGMENT): first chunk, chunks, numel
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
    if all([tensor.is_contiguous() for tensor in tensors]):
        return _flat(tuple([tensor.numel() for tensor in tensors]))
    return tuple([layout(tensor) or Layout(tensor.numel()) for tensor in tensors])


@functools.lru_cache(maxsize=64)
def _flat(sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    return tuple(Layout(size) for size in sizes)


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
    chunks: list[tuple[int, ...]] = []
    groups: dict[int, list[int]] = {}
    info, offsets, size = [], [], 0
    for tensor, (lay, segment) in enumerate(zip(layouts, segments, strict=True)):
        first = len(chunks)
        for start in range(0, lay.numel, chunk):
            chunks.append((start, lay.numel - start, size + start, segment, tensor))
        info.append((*lay, first, len(chunks) - 1))
        offsets.append(size)
        size += -(-lay.numel // 16) * 16  # masks begin at multiples of 16 bytes
        group = groups.setdefault(segment, [first, 0, 0, 0])
        group[1] = len(chunks) - group[0]
        group[2] += lay.numel
    chunks.append(chunks[-1])
    rows = (_to_device(values, device) for values in (chunks, info, list(groups.values())))
    return Table(*rows, offsets=tuple(offsets), size=size)


@functools.lru_cache(maxsize=256)
def _rows(
    pointers: tuple[int, ...],
    layouts: tuple[Layout, ...],
    segments: tuple[int, ...],
    device: torch.device,
    *,
    itemsize: int,
    chunk: int,
) -> Tensor:
    """The chunks of a table with addresses for offsets."""
    rows = _table(layouts, segments, device, chunk).chunks.clone()
    rows[:, 0] *= itemsize
    rows[:, 0] += _to_device(pointers, device)[rows[:, 4]]
    return rows


def _pointers(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], bool]:
    """Returns the addresses of `tensors`, and whether all are multiples of 16 bytes."""
    pointers = tuple([tensor.data_ptr() for tensor in tensors])
    return pointers, not any([pointer % 16 for pointer in pointers])


@triton.jit
def _chunk(row, KEY: tl.constexpr, ALIGNED: tl.constexpr):
    # (address, elements up to the end of the tensor)
    pointer = tl.load(row).to(tl.pointer_type(KEY))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer, tl.load(row + 1)


@triton.jit
def _keys(pointer, place, left, SIGN: tl.constexpr, SIZE: tl.constexpr):
    # a whole chunk loads without a mask, in vectors
    if left >= SIZE:
        bits = tl.load(pointer + place)
    else:
        bits = tl.load(pointer + place, mask=place < left, other=0)
    return bits.to(tl.int32) & SIGN


@triton.jit
def _wait_for_all(arrivals, turn, programs):
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="acq_rel")
    while tl.atomic_add(arrivals, 0, sem="acq_rel") < turn * programs:
        pass
    tl.debug_barrier()


@triton.jit
def _fresh(pointer):
    # reads what other programs have written: past the first-level cache
    return tl.load(pointer, cache_modifier=".cg")


@triton.jit
def _narrow(here, low, last):
    # stores an interval, with bins just wide enough to cover it
    shift = tl.zeros([], tl.int64)
    for width in tl.static_range(21):
        shift += (last - low >= (BINS << width)).to(tl.int64)
    tl.store(here, low)
    tl.store(here + 1, last)
    tl.store(here + 2, shift)


@triton.jit
def _guess(segment, rows, segments, keep, state, unsettled,
           KEY: tl.constexpr, SIGN: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """From a sample of the segment: an interval that most likely holds the k-th key."""
    here = state + segment * STATE
    about = segments + segment * SEGMENT
    wanted = tl.load(keep + segment)
    # some keys out of every chunk, at scattered places
    index = tl.arange(0, SAMPLE)
    row = rows + (tl.load(about) + index.to(tl.int64) * tl.load(about + 1) // SAMPLE) * ROW
    size = tl.minimum(tl.load(row + 1), SIZE).to(tl.uint32)
    place = ((index.to(tl.uint32) * 2654435761) >> 8) % size
    key = tl.load(tl.load(row).to(tl.pointer_type(KEY)) + place).to(tl.int32) & SIGN
    # the rank of the k-th in the sample, give or take five standard deviations
    total = tl.load(about + 2).to(tl.float32)
    rank = wanted.to(tl.float32) / total * SAMPLE
    margin = 5 * tl.sqrt(rank * (1 - rank / SAMPLE)) + 8
    more = (rank + margin).to(tl.int64)
    less = tl.maximum((rank - margin).to(tl.int64), 0)
    # the largest keys that at least so many of the sample reach, bit by bit; counts of 20 bits each
    low = tl.zeros([], tl.int32)
    last = tl.zeros([], tl.int32)
    middle = tl.zeros([], tl.int32)
    for step in range(31):
        bit = tl.full([], 1 << 30, tl.int32) >> step
        reach = (key >= (low | bit)).to(tl.int64)
        reach += (key >= (last | bit)).to(tl.int64) << 20
        reach += (key >= (middle | bit)).to(tl.int64) << 40
        count = tl.sum(reach)
        low |= tl.where((count & 0xFFFFF) >= more, bit, 0)
        last |= tl.where(((count >> 20) & 0xFFFFF) >= less, bit, 0)
        middle |= tl.where((count >> 40) >= rank.to(tl.int64) + 1, bit, 0)
    last = tl.where(less > 0, last, SIGN)
    _narrow(here, low.to(tl.int64), last.to(tl.int64))
    tl.store(here + 3, wanted)
    tl.store(here + 6, middle.to(tl.int64))
    if wanted == 0:  # nothing is above the threshold, and of those equal to it none is kept
        tl.store(here, SIGN)
        tl.store(here + 4, 1)
        tl.store(here + 5, 1)
        tl.atomic_add(unsettled, 1)


@triton.jit
def _flush(here, bins, known, often, above, first):
    # hands the sums of a program over to its segment
    if known == 0:
        if often > 0:
            place = (_fresh(here + 6) - _fresh(here)) >> _fresh(here + 2)
            tl.atomic_add(bins + place, often.to(tl.int32), sem="relaxed")
        if first and above > 0:
            tl.atomic_add(here + 7, above, sem="relaxed")


@triton.jit
def _count(begin, end, rows, state, counts, first, COPIES: tl.constexpr,
           KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Adds the keys of some chunks to the bins of the intervals of their segments."""
    copy = tl.program_id(0) % COPIES
    place = tl.arange(0, SIZE)
    here = state
    bins = counts
    current = tl.full([], -1, tl.int64)
    known = tl.full([], 1, tl.int64)
    often = tl.zeros([], tl.int64)
    above = tl.zeros([], tl.int64)
    low = tl.zeros([], tl.int32)
    last = low
    shift = low
    guess = low
    next_pointer, next_left = _chunk(rows + begin * ROW, KEY, ALIGNED)
    next_segment = tl.load(rows + begin * ROW + 3)
    for chunk in range(begin, end):
        pointer = next_pointer
        left = next_left
        segment = next_segment
        next_pointer, next_left = _chunk(rows + (chunk + 1) * ROW, KEY, ALIGNED)
        next_segment = tl.load(rows + (chunk + 1) * ROW + 3)
        if segment != current:
            _flush(here, bins, known, often, above, first)
            current = segment
            here = state + segment * STATE
            bins = counts + (segment * COPIES + copy) * BINS
            known = _fresh(here + 5)
            low = _fresh(here).to(tl.int32)
            last = _fresh(here + 1).to(tl.int32)
            shift = _fresh(here + 2).to(tl.int32)
            guess = _fresh(here + 6).to(tl.int32)
            often = tl.zeros([], tl.int64)
            above = tl.zeros([], tl.int64)
        if known == 0:
            key = _keys(pointer, place, left, SIGN, SIZE)
            valid = place < left
            inside = valid & (key >= low) & (key <= last)
            # one key may make up much of a tensor (zero, a level of a quantizer): added up first
            same = inside & (key == guess)
            sums = tl.sum(same.to(tl.int32) + ((valid & (key > last)).to(tl.int32) << 16))
            often += sums & 0xFFFF
            above += sums >> 16
            inside = inside & (key != guess)
            tl.atomic_add(bins + ((key - low) >> shift), 1, mask=inside, sem="relaxed")
    _flush(here, bins, known, often, above, first)


@triton.jit
def _descend(segment, state, counts, unknown, unsettled, first,
             COPIES: tl.constexpr, SIGN: tl.constexpr):  # fmt: skip
    """Goes on with the bin that holds the k-th key, or beside an interval that does not."""
    here = state + segment * STATE
    if tl.load(here + 5) == 0:
        place = tl.arange(0, BINS)
        count = tl.zeros([BINS], tl.int64)
        for copy in tl.static_range(COPIES):
            count += _fresh(counts + (segment * COPIES + copy) * BINS + place).to(tl.int64)
        inside = tl.sum(count)
        low = tl.load(here)
        last = tl.load(here + 1)
        shift = tl.load(here + 2)
        rank = tl.load(here + 3)
        above = tl.zeros([], tl.int64)
        if first:
            above = _fresh(here + 7)
        if rank <= above:
            _narrow(here, last + 1, SIGN)
            tl.atomic_add(unknown, 1)
        elif rank > above + inside:
            _narrow(here, tl.zeros([], tl.int64), low - 1)
            tl.store(here + 3, rank - above - inside)
            tl.atomic_add(unknown, 1)
        else:
            rank -= above
            at_or_above = inside - tl.cumsum(count, 0) + count
            chosen = tl.sum((at_or_above >= rank).to(tl.int64)) - 1
            rank -= tl.sum(tl.where(place > chosen, count, 0))
            ties = tl.sum(tl.where(place == chosen, count, 0))
            low += chosen << shift
            _narrow(here, low, tl.minimum(last, low + ((1 + tl.zeros([], tl.int64)) << shift) - 1))
            tl.store(here + 3, rank)
            tl.store(here + 4, ties)
            if shift == 0:
                tl.store(here + 5, 1)
                if rank < ties:
                    tl.atomic_add(unsettled, 1)
            else:
                tl.atomic_add(unknown, 1)


@triton.jit
def _in_order(index, channels, spatial):
    # where the index-th element in row-major order lies in memory
    row = index // (channels * spatial)
    rest = index - row * channels * spatial
    channel = rest // spatial
    return row * channels * spatial + (rest - channel * spatial) * channels + channel


@triton.jit
def _keys_in_order(row, info, pointer, left, key, SIGN: tl.constexpr, SIZE: tl.constexpr):
    # the keys of a chunk in row-major order, and their places relative to `pointer`
    about = info + tl.load(row + 4) * INFO
    place = tl.arange(0, SIZE)
    spatial = tl.load(about + 2)
    where = place.to(tl.int64)
    if spatial > 1:
        start = tl.load(about) - left
        where = _in_order(start + place, tl.load(about + 1), spatial) - start
        key = tl.load(pointer + where, mask=place < left, other=0).to(tl.int32) & SIGN
    return key, where


@triton.jit
def _count_ties(chunk, rows, info, state, found,
                KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Counts the keys of a chunk that equal the k-th, where not all of them are kept."""
    row = rows + chunk * ROW
    pointer, left = _chunk(row, KEY, ALIGNED)
    place = tl.arange(0, SIZE)
    key = _keys(pointer, place, left, SIGN, SIZE)
    here = state + tl.load(row + 3) * STATE
    if _fresh(here + 3) < _fresh(here + 4):
        key, _ = _keys_in_order(row, info, pointer, left, key, SIGN, SIZE)
        tied = (key == _fresh(here).to(tl.int32)) & (place < left)
        tl.store(found + chunk, tl.sum(tied.to(tl.int32)))


@triton.jit
def _add_up(segment, segments, found, until, SIZE: tl.constexpr):
    """Writes how many ties of the segment there are up to and with each chunk."""
    first = tl.load(segments + segment * SEGMENT)
    end = first + tl.load(segments + segment * SEGMENT + 1)
    so_far = tl.zeros([], tl.int32)
    for at in range(first, end, SIZE):
        chunk = at + tl.arange(0, SIZE)
        ties = tl.load(found + chunk, mask=chunk < end, other=0, cache_modifier=".cg")
        tl.store(until + chunk, so_far + tl.cumsum(ties, 0), mask=chunk < end)
        so_far += tl.sum(ties)


@triton.jit
def _write_mask(chunk, rows, info, state, found, until, mask,
                KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Writes True where a key is above the k-th, and for the first `rank` of those equal to it."""
    row = rows + chunk * ROW
    pointer, left = _chunk(row, KEY, ALIGNED)
    place = tl.arange(0, SIZE)
    key = _keys(pointer, place, left, SIGN, SIZE)
    out = mask + tl.multiple_of(tl.load(row + 2), 16)
    here = state + tl.load(row + 3) * STATE
    threshold = _fresh(here).to(tl.int32)
    rank = _fresh(here + 3)
    take = rank >= _fresh(here + 4)  # all of the ties, or none of those in this tensor
    partly = False
    if not take:
        # position decides: which of the ties of this tensor come first in the segment?
        about = info + tl.load(row + 4) * INFO
        first = tl.load(about + 3)
        earlier = _fresh(until + first) - _fresh(found + first)
        through = _fresh(until + tl.load(about + 4))
        take = through <= rank
        partly = (earlier < rank) & (rank < through)
        if partly:
            ordered, where = _keys_in_order(row, info, pointer, left, key, SIGN, SIZE)
            tied = (ordered == threshold) & (place < left)
            order = _fresh(until + chunk) - _fresh(found + chunk) + tl.cumsum(tied.to(tl.int32), 0)
            chosen = (ordered > threshold) | (tied & (order <= rank))
            tl.store(out + where, chosen.to(tl.uint8), mask=place < left)
    if not partly:
        kept = ((key > threshold) | ((key == threshold) & take)).to(tl.uint8)
        if left >= SIZE:
            tl.store(out + place, kept)
        else:
            tl.store(out + place, kept, mask=place < left)


@triton.jit
def _select_kernel(
    rows, info, segments, keep, state, counts, found, until, signals, mask,
    chunk_count, segment_count, COPIES: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Finds the k-th key of every segment and writes the masks."""
    me = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = (chunk_count.to(tl.int64) * me // programs).to(tl.int32)
    end = (chunk_count.to(tl.int64) * (me + 1) // programs).to(tl.int32)
    unsettled = signals + PASSES + 1  # segments in which position decides among ties
    for segment in range(me, segment_count, programs):
        _guess(segment, rows, segments, keep, state, unsettled, KEY, SIGN, SIZE)
    _wait_for_all(signals, 1, programs)
    turn = 1
    unknown = segment_count
    for one in range(PASSES):
        if unknown > 0:
            bins = counts + one * segment_count * COPIES * BINS
            _count(begin, end, rows, state, bins, one == 0, COPIES, KEY, SIGN, ALIGNED, SIZE)
            _wait_for_all(signals, turn + 1, programs)
            for segment in range(me, segment_count, programs):
                _descend(segment, state, bins, signals + one + 1, unsettled, one == 0, COPIES, SIGN)
            _wait_for_all(signals, turn + 2, programs)
            turn += 2
            unknown = _fresh(signals + one + 1)
    if _fresh(unsettled) > 0:
        for chunk in range(begin, end):
            _count_ties(chunk, rows, info, state, found, KEY, SIGN, ALIGNED, SIZE)
        _wait_for_all(signals, turn + 1, programs)
        for segment in range(me, segment_count, programs):
            _add_up(segment, segments, found, until, SIZE)
        _wait_for_all(signals, turn + 2, programs)
    for chunk in range(begin, end):
        _write_mask(chunk, rows, info, state, found, until, mask, KEY, SIGN, ALIGNED, SIZE)


@triton.jit
def _zero_kernel(
    chunks, tensors, masks, KEY: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr
):
    """Writes +0 wherever the mask is False."""
    row = chunks + tl.program_id(0) * ROW
    start = tl.multiple_of(tl.load(row), 16)
    left = tl.load(row + 1)
    tensor = tl.load(row + 4)
    pointer = tl.load(tensors + tensor).to(tl.pointer_type(KEY))
    kept = tl.load(masks + tensor).to(tl.pointer_type(tl.int8))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        kept = tl.multiple_of(kept, 16)
    place = tl.arange(0, SIZE)
    keep = _keys(kept + start, place, left, 1, SIZE) != 0
    if left >= SIZE:
        bits = tl.load(pointer + start + place)
        tl.store(pointer + start + place, tl.where(keep, bits, 0))
    else:
        tl.store(pointer + start + place, tl.zeros([SIZE], KEY), mask=(place < left) & ~keep)


def keep_largest(
    tensors: Sequence[Tensor], keep: Sequence[int], segments: Sequence[int]
) -> list[Tensor]:
    """Masks that keep, in each segment, exactly the `keep[segment]` largest magnitudes.

    Args:
        tensors: of one dtype out of `KEYS`, on one device, each with a `layout`, none of them empty.
        keep: how many to keep, per segment.
        segments: the segment of each tensor, from 0 up; those of a segment follow one another.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    layouts, segments = _layouts(tensors), tuple(segments)
    table = _table(layouts, segments, device, CHUNK)
    pointers, aligned = _pointers(tensors)
    rows = _rows(pointers, layouts, segments, device, itemsize=dtype.itemsize, chunk=CHUNK)
    chunks, groups = len(rows) - 1, len(keep)
    copies = max(COPIES // groups, 1)
    sizes = [2 * STATE.value * groups, PASSES.value * groups * copies * BINS.value]
    sizes += [chunks, chunks, PASSES.value + 2]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    state, counts, found, until, signals = zeros.split(sizes)
    mask = torch.empty(table.size, dtype=torch.bool, device=device)
    _select_kernel[min(chunks, _programs(device)),](
        rows, table.info, table.segments, _on_device(tuple(keep), device),
        state.view(torch.int64), counts, found, until, signals, mask, chunks, groups, copies,
        KEYS[dtype], (1 << (8 * dtype.itemsize - 1)) - 1, aligned, CHUNK,
        num_warps=WARPS, maxnreg=REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    if sum(layout.numel for layout in layouts) == table.size and all(
        [tensor.is_contiguous() for tensor in tensors]
    ):
        return list(_unflatten_dense_tensors(mask, tensors))  # the same, faster
    return [
        mask.as_strided(tensor.shape, tensor.stride(), offset)
        for tensor, offset in zip(tensors, table.offsets, strict=True)
    ]


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs run at the same time; one where Triton interprets them one by one."""
    if device.type != "cuda":
        return 1
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


def zero_unmasked_(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zeroes every tensor where its mask is False.

    Args:
        tensors: of one dtype out of `KEYS`, on one device, each filling one stretch of memory.
        masks: with the strides of their tensors.
    """
    device = tensors[0].device
    flat = _flat(tuple([tensor.numel() for tensor in tensors]))
    table = _table(flat, (0,) * len(tensors), device, CHUNK)
    pointers, aligned = _pointers(tensors)
    kept, kept_aligned = _pointers(masks)
    _zero_kernel[len(table.chunks) - 1,](
        table.chunks, _on_device(pointers, device), _on_device(kept, device),
        KEYS[tensors[0].dtype], aligned and kept_aligned, CHUNK, num_warps=WARPS,
    )  # fmt: skip
