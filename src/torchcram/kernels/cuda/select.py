"""Selection of the largest magnitudes, in one launch.

First the k-th largest key of every segment is found. A sample of the keys gives an interval that
most likely holds it; where there are many chunks, counting some of them narrows that interval. Then
passes over all chunks count the keys of the interval in fine bins, which add up to coarse ones, and
go on with the bin that holds the k-th, until it is one key wide, mostly after the first pass. A
sample that misleads costs further passes, nothing else. Then the masks are written, and where asked
for the other values are zeroed; among keys equal to the k-th, position decides.

    rank   number of keys of the interval that are to be kept
    ties   number of keys that equal the k-th
    guess  key that is the k-th according to the sample
    above  number of keys above the interval
    seen   number of keys in the chunks that are counted first
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch._utils import _unflatten_dense_tensors

from torchcram.kernels.cuda.chunks import (
    CHUNK,
    INFO,
    KEYS,
    ROW,
    SEGMENT,
    WARPS,
    Layout,
    _addresses,
    _all_contiguous,
    _bits,
    _chunk,
    _flat,
    _fresh,
    _keep_while_captured,
    _key,
    _on_device,
    _pointers,
    _read,
    _wait_for_all,
    layout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

BINS = tl.constexpr(2048)  # coarse bins; each consists of up to 2 ** DEPTH fine bins
SAMPLE = tl.constexpr(1024)  # keys in the sample of a segment
PASSES = tl.constexpr(4)  # BINS ** 3 > 2 ** 31, and one more if the sample misleads
STATE = tl.constexpr(9)  # low, last, shift, rank, ties, known, guess, above, seen
ORDERED = tl.constexpr(1024)  # elements at a time where their order matters
PROGRAMS = 4  # programs per multiprocessor, all running at the same time
REGISTERS = 128  # registers per thread, so that all programs fit
STRIDE = 8  # of many chunks, every STRIDE-th is counted first
BINS_AT_ONCE = 1024  # fine bins that a program adds up at a time
DEPTH, SHALLOW = 7, 3  # fine bins per coarse bin, in bits, for many and for few chunks
SIGNALS = tl.constexpr(PASSES.value + 2)  # arrivals, unknown segments after each pass, unsettled


def keep_largest(
    tensors: Sequence[Tensor], keep: Sequence[int], segments: Sequence[int], *, zero: bool = False
) -> list[Tensor]:
    """Returns masks that keep exactly the `keep[segment]` largest magnitudes of each segment.

    Args:
        tensors: Tensors of the same dtype in `KEYS`, on one device, none empty.
        keep: Number of elements to keep, by segment.
        segments: Segment of each tensor, from 0 up; tensors of a segment follow one another.
        zero: Whether to zero all other elements of `tensors`, each of which must have a `layout`.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    segments = tuple(segments)
    contiguous = _all_contiguous(tensors)
    if contiguous:
        layouts = _flat(tuple([tensor.numel() for tensor in tensors]))
    else:
        tensors = [tensor if layout(tensor) else tensor.contiguous() for tensor in tensors]
        layouts = tuple([layout(tensor) or Layout(tensor.numel()) for tensor in tensors])
    pointers, aligned = _pointers(tensors)
    table, rows = _keep_while_captured(
        _addresses(pointers, layouts, segments, device, itemsize=dtype.itemsize, chunk=CHUNK)
    )
    chunks, groups = len(table.chunks), len(keep)
    programs = min(chunks, _programs(device))
    stride = STRIDE if chunks >= STRIDE * programs else 1
    depth = max((DEPTH if stride > 1 else SHALLOW) - (groups - 1).bit_length(), 0)
    parts = max((BINS.value << depth) // BINS_AT_ONCE, 1) if programs > 1 else 1
    counts = groups * (BINS.value << depth) * (PASSES.value + (stride > 1))
    words = SIGNALS.value + 2 * chunks + groups * BINS.value + counts
    scratch = torch.zeros(STATE.value * groups + -(-words // 2), dtype=torch.int64, device=device)
    mask = torch.empty(table.size, dtype=torch.bool, device=device)
    counts_to_keep = _keep_while_captured(_on_device(tuple(keep), device))
    _select_kernel[programs,](
        rows, counts_to_keep, scratch, mask, chunks, len(tensors), groups,
        stride, parts, depth, KEYS[dtype], (1 << (8 * dtype.itemsize - 1)) - 1,
        aligned, CHUNK, zero,
        num_warps=WARPS, maxnreg=REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    if table.packed and contiguous:
        return list(_unflatten_dense_tensors(mask, tensors))  # faster than as_strided
    return [
        mask.as_strided(tensor.shape, tensor.stride(), offset)
        for tensor, offset in zip(tensors, table.offsets, strict=True)
    ]


@functools.cache
def _programs(device: torch.device) -> int:
    """Returns the number of programs that run at the same time; 1 if Triton interprets them."""
    if device.type != "cuda":
        return 1
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)


@triton.jit
def _select_kernel(
    table, keep, scratch, mask, chunk_count, tensor_count, segment_count,
    STRIDE: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """Finds the k-th key of every segment, writes the masks and zeroes what is not kept."""
    rows = table
    info = rows + chunk_count * ROW
    segments = info + tensor_count * INFO
    state = scratch
    words = (scratch + segment_count * STATE).to(tl.pointer_type(tl.int32))
    chunk_ties = words + SIGNALS
    ties_until = chunk_ties + chunk_count
    coarse = ties_until + chunk_count
    counts = coarse + segment_count * BINS
    unsettled = words + PASSES + 1  # number of segments in which position decides among ties
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = (program.to(tl.int64) * chunk_count // programs).to(tl.int32)
    end = ((program.to(tl.int64) + 1) * chunk_count // programs).to(tl.int32)
    for segment in range(program, segment_count, programs):
        _guess(segment, rows, segments, keep, state, unsettled, KEY, SIGN, SIZE)
    _wait_for_all(words, 1, programs)
    turn = 1
    bins = counts
    if STRIDE > 1:
        _count(begin, end, STRIDE, rows, state, bins, True, DEPTH, KEY, SIGN, ALIGNED, SIZE)
        _wait_for_all(words, 2, programs)
        _add_bins(program, programs, segment_count, state, bins, coarse, PARTS, DEPTH)
        _wait_for_all(words, 3, programs)
        for segment in range(program, segment_count, programs):
            _refine(segment, segments, state, coarse)
        _wait_for_all(words, 4, programs)
        turn = 4
        bins += segment_count * (BINS << DEPTH)
    unknown = segment_count
    for pass_number in range(PASSES):
        if unknown > 0:
            first = pass_number == 0
            _count(begin, end, 1, rows, state, bins, first, DEPTH, KEY, SIGN, ALIGNED, SIZE)
            _wait_for_all(words, turn + 1, programs)
            _add_bins(program, programs, segment_count, state, bins, coarse, PARTS, DEPTH)
            _wait_for_all(words, turn + 2, programs)
            for segment in range(program, segment_count, programs):
                _descend(segment, state, bins, coarse, words + pass_number + 1, unsettled, first,
                         DEPTH, SIGN)  # fmt: skip
            _wait_for_all(words, turn + 3, programs)
            turn += 3
            unknown = _fresh(words + pass_number + 1)
            bins += segment_count * (BINS << DEPTH)
    _write_masks(begin, end, rows, info, state, chunk_ties, mask, KEY, SIGN, ALIGNED, SIZE, ZERO)
    if _fresh(unsettled) > 0:
        _wait_for_all(words, turn + 1, programs)
        for segment in range(program, segment_count, programs):
            _add_up(segment, segments, chunk_ties, ties_until, SIZE)
        _wait_for_all(words, turn + 2, programs)
        for chunk in range(begin, end):
            _settle(chunk, rows, info, state, chunk_ties, ties_until, mask,
                    KEY, SIGN, ALIGNED, SIZE, ZERO)  # fmt: skip


# The k-th largest key


@triton.jit
def _narrow(here, low, last):
    # stores an interval and the smallest width of coarse bins that covers it
    shift = tl.zeros([], tl.int64)
    for width in tl.static_range(21):
        shift += (last - low >= (BINS << width)).to(tl.int64)
    tl.store(here, low)
    tl.store(here + 1, last)
    tl.store(here + 2, shift)


@triton.jit
def _guess(segment, rows, segments, keep, state, unsettled,
           KEY: tl.constexpr, SIGN: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Stores an interval that most likely holds the k-th key, from a sample of the segment."""
    here = state + segment * STATE
    about = segments + segment * SEGMENT
    kept_count = tl.load(keep + segment)
    # keys from all chunks at scattered positions
    index = tl.arange(0, SAMPLE)
    row = rows + (tl.load(about) + index.to(tl.int64) * tl.load(about + 1) // SAMPLE) * ROW
    size = tl.minimum(tl.load(row + 1), SIZE).to(tl.uint32)
    lane = ((index.to(tl.uint32) * 2654435761) >> 8) % size
    key = tl.load(tl.load(row).to(tl.pointer_type(KEY)) + lane).to(tl.int32) & SIGN
    # rank of the k-th key in the sample, plus or minus five standard deviations
    total = tl.load(about + 2).to(tl.float32)
    rank = kept_count.to(tl.float32) / total * SAMPLE
    # where all keys are kept, rounding may put the rank above the size of the sample
    margin = 5 * tl.sqrt(tl.maximum(rank * (1 - rank / SAMPLE), 0.0)) + 8
    more = (rank + margin).to(tl.int64)
    less = tl.maximum((rank - margin).to(tl.int64), 0)
    # largest keys that at least `more`, `less` and `rank` of the sample reach, bit by bit; three
    # counts of 20 bits in a word
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
    tl.store(here + 3, kept_count)
    tl.store(here + 6, middle.to(tl.int64))
    if kept_count == 0:  # no key is above the threshold, and none equal to it is kept
        tl.store(here, SIGN)
        tl.store(here + 4, 1)
        tl.store(here + 5, 1)
        tl.atomic_add(unsettled, 1)


@triton.jit
def _bins(here, counts, segment, copy, DEPTH: tl.constexpr):
    """Returns the bins of a program; an interval of at most BINS keys has room for copies."""
    bins = counts + segment * (BINS << DEPTH)
    return bins + tl.where(_fresh(here + 2) == 0, copy * BINS, 0)


@triton.jit
def _flush(here, bins, known, often, above, seen, first, DEPTH: tl.constexpr):
    # adds the sums of a program to those of its segment
    if known == 0:
        guess = _fresh(here + 6)
        low = _fresh(here)
        if (often > 0) & (guess >= low) & (guess <= _fresh(here + 1)):
            bin_index = (guess - low) >> tl.maximum(_fresh(here + 2) - DEPTH, 0)
            tl.atomic_add(bins + bin_index, often.to(tl.int32), sem="relaxed")
        if first:
            tl.atomic_add(here + 7, above, sem="relaxed")
            tl.atomic_add(here + 8, seen, sem="relaxed")


@triton.jit
def _count(
    begin, end, stride, rows, state, counts, first, DEPTH: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Adds the keys of every stride-th chunk to the fine bins of their segments."""
    copy = tl.program_id(0) % (1 << DEPTH)
    lane = tl.arange(0, SIZE)
    here = state
    bins = counts
    current = tl.full([], -1, tl.int64)
    known = tl.full([], 1, tl.int64)
    often = tl.zeros([], tl.int64)
    above = tl.zeros([], tl.int64)
    seen = tl.zeros([], tl.int64)
    low = tl.zeros([], tl.int32)
    span = low
    finer = low
    guess = low
    bits, left, segment = _read(rows, begin, KEY, ALIGNED, SIZE)
    for chunk in range(begin, end, stride):
        # prefetches the next chunk
        ahead = tl.where(chunk + stride < end, chunk + stride, chunk)
        bits_ahead, left_ahead, segment_ahead = _read(rows, ahead, KEY, ALIGNED, SIZE)
        if segment != current:
            _flush(here, bins, known, often, above, seen, first, DEPTH)
            current = segment
            here = state + segment * STATE
            bins = _bins(here, counts, segment, copy, DEPTH)
            known = _fresh(here + 5)
            low = _fresh(here).to(tl.int32)
            span = _fresh(here + 1).to(tl.int32) - low
            finer = tl.maximum(_fresh(here + 2) - DEPTH, 0).to(tl.int32)
            guess = _fresh(here + 6).to(tl.int32) - low
            often = tl.zeros([], tl.int64)
            above = tl.zeros([], tl.int64)
            seen = tl.zeros([], tl.int64)
        if known == 0:
            offset = _key(bits, lane, left, SIGN, SIZE) - low  # from -2 ** 31 to 2 ** 31 - 1
            # a single key may be frequent (zero, a level of a quantizer) and is counted separately
            same = offset == guess
            sums = tl.sum(same.to(tl.int32) | ((offset > span).to(tl.int32) << 16))
            often += sums & 0xFFFF
            above += sums >> 16
            seen += tl.minimum(left, SIZE)
            inside = (offset >= 0) & (offset <= span) & (offset != guess)
            tl.atomic_add(bins + (offset >> finer), 1, mask=inside, sem="relaxed")
        bits = bits_ahead
        left = left_ahead
        segment = segment_ahead
    _flush(here, bins, known, often, above, seen, first, DEPTH)


@triton.jit
def _add_bins(me, programs, segment_count, state, counts, coarse,
              PARTS: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Adds up the fine bins, or the copies, of each coarse bin; all programs share the work."""
    for block in range(me, segment_count * PARTS, programs):
        segment = block // PARTS
        here = state + segment * STATE
        if _fresh(here + 5) == 0:
            shift = _fresh(here + 2)
            deep = shift - tl.maximum(shift - DEPTH, 0)
            coarse_bin = (block - segment * PARTS) * (BINS // PARTS) + tl.arange(0, BINS // PARTS)
            fine = tl.arange(0, 1 << DEPTH)[None, :]
            # fine bins are adjacent, copies are BINS apart
            apart = fine * BINS + coarse_bin[:, None]
            together = (coarse_bin[:, None].to(tl.int64) << deep) + fine
            bins = counts + (segment + tl.zeros([], tl.int64)) * (BINS << DEPTH)
            where = tl.where(shift == 0, apart, together)
            inside = fine + 0 * coarse_bin[:, None] < tl.where(shift == 0, 1 << DEPTH, 1 << deep)
            count = tl.load(bins + where, mask=inside, other=0, cache_modifier=".cg")
            tl.store(coarse + segment * BINS + coarse_bin, tl.sum(count, 1))


@triton.jit
def _refine(segment, segments, state, coarse):
    """Narrows the interval by the chunks counted so far, with a margin of eight deviations."""
    here = state + segment * STATE
    seen = _fresh(here + 8).to(tl.float32)
    if (tl.load(here + 5) == 0) & (seen > 0):
        count = _fresh(coarse + segment * BINS + tl.arange(0, BINS)).to(tl.int64)
        low = tl.load(here)
        last = tl.load(here + 1)
        shift = tl.load(here + 2)
        above = _fresh(here + 7)
        total = tl.load(segments + segment * SEGMENT + 2).to(tl.float32)
        rank = tl.load(here + 3).to(tl.float32) / total * seen
        margin = 8 * tl.sqrt(tl.maximum(rank * (1 - rank / seen), 0.0)) + 8
        at_or_above = above + tl.sum(count) - tl.cumsum(count, 0) + count
        lower = tl.sum((at_or_above >= (rank + margin).to(tl.int64)).to(tl.int64)) - 1
        upper = tl.sum((at_or_above >= (rank - margin).to(tl.int64)).to(tl.int64))
        if rank - margin > above.to(tl.float32):
            last = tl.minimum(last, low + (tl.maximum(upper, 1) << shift) - 1)
        # never empty: keys between its ends would be counted twice
        _narrow(here, tl.minimum(low + (tl.maximum(lower, 0) << shift), last), last)
        tl.store(here + 7, 0)


@triton.jit
def _descend(segment, state, counts, coarse, unknown, unsettled, first,
             DEPTH: tl.constexpr, SIGN: tl.constexpr):  # fmt: skip
    """Narrows the interval to the bin of the k-th key, or moves to the side where the key is."""
    here = state + segment * STATE
    if tl.load(here + 5) == 0:
        count = _fresh(coarse + segment * BINS + tl.arange(0, BINS)).to(tl.int64)
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
            chosen, rank, ties = _bin_of(count, tl.arange(0, BINS), rank - above)
            low += chosen << shift
            finer = tl.maximum(shift - DEPTH, 0)
            if shift > 0:
                fine_bin = tl.arange(0, 1 << DEPTH)
                within = fine_bin < (1 << (shift - finer))
                fine = counts + (segment + tl.zeros([], tl.int64)) * (BINS << DEPTH)
                fine += (chosen << (shift - finer)) + fine_bin
                deeper = tl.load(fine, mask=within, other=0, cache_modifier=".cg")
                chosen, rank, ties = _bin_of(deeper.to(tl.int64), fine_bin, rank)
                low += chosen << finer
            _narrow(here, low, tl.minimum(last, low + ((1 + tl.zeros([], tl.int64)) << finer) - 1))
            tl.store(here + 3, rank)
            tl.store(here + 4, ties)
            if finer == 0:
                tl.store(here + 5, 1)
                if rank < ties:
                    tl.atomic_add(unsettled, 1)
            else:
                tl.atomic_add(unknown, 1)


@triton.jit
def _bin_of(count, bin_index, rank):
    # bin of the key with this rank from above, the rank within the bin, and its number of keys
    at_or_above = tl.sum(count) - tl.cumsum(count, 0) + count
    chosen = tl.sum((at_or_above >= rank).to(tl.int64)) - 1
    rank -= tl.sum(tl.where(bin_index > chosen, count, 0))
    return chosen, rank, tl.sum(tl.where(bin_index == chosen, count, 0))


# Masks from thresholds


@triton.jit
def _in_order(index, channels, spatial):
    # memory offset of the index-th element in row-major order
    row = index // (channels * spatial)
    rest = index - row * channels * spatial
    channel = rest // spatial
    return row * channels * spatial + (rest - channel * spatial) * channels + channel


@triton.jit
def _keys_in_order(row, info, pointer, lane, left, SIGN: tl.constexpr):
    # keys of a chunk in row-major order, and their offsets from `pointer`
    about = info + tl.load(row + 4) * INFO
    spatial = tl.load(about + 2)
    where = lane.to(tl.int64)
    if spatial > 1:
        start = tl.load(about) - left
        where = _in_order(start + lane, tl.load(about + 1), spatial) - start
    bits = tl.load(pointer + where, mask=lane < left, other=0)
    return bits.to(tl.int32) & SIGN, where


@triton.jit
def _ties_in_order(row, info, threshold, KEY: tl.constexpr, SIGN: tl.constexpr,
                   ALIGNED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    # number of keys equal to the threshold in a chunk in row-major order
    pointer, left = _chunk(row, KEY, ALIGNED)
    ties = tl.zeros([ORDERED], tl.int32)
    for start in range(0, SIZE, ORDERED):
        part = start + tl.arange(0, ORDERED)
        key, _ = _keys_in_order(row, info, pointer, part, left, SIGN)
        ties += ((key == threshold) & (part < left)).to(tl.int32)
    return tl.sum(ties)


@triton.jit
def _write_first(row, info, pointer, left, threshold, rank, earlier, out,
                 KEY: tl.constexpr, SIGN: tl.constexpr, SIZE: tl.constexpr,
                 ZERO: tl.constexpr):  # fmt: skip
    """Writes the mask of a chunk in which only the first ties are kept."""
    for start in range(0, SIZE, ORDERED):
        lane = start + tl.arange(0, ORDERED)
        key, where = _keys_in_order(row, info, pointer, lane, left, SIGN)
        tied = ((key == threshold) & (lane < left)).to(tl.int32)
        first = (tied > 0) & (earlier + tl.cumsum(tied, 0) <= rank)
        tl.store(out + where, ((key > threshold) | first).to(tl.uint8), mask=lane < left)
        if ZERO:  # no other chunk reads or writes these ties
            tl.store(pointer + where, tl.zeros([ORDERED], KEY), mask=(tied > 0) & (first == 0))
        earlier += tl.sum(tied)


@triton.jit
def _add_up(segment, segments, chunk_ties, ties_until, SIZE: tl.constexpr):
    """Writes the number of ties of the segment up to and including each chunk."""
    first = tl.load(segments + segment * SEGMENT)
    end = first + tl.load(segments + segment * SEGMENT + 1)
    so_far = tl.zeros([], tl.int32)
    for at in range(first, end, SIZE):
        chunk = at + tl.arange(0, SIZE)
        ties = tl.load(chunk_ties + chunk, mask=chunk < end, other=0, cache_modifier=".cg")
        tl.store(ties_until + chunk, so_far + tl.cumsum(ties, 0), mask=chunk < end)
        so_far += tl.sum(ties)


@triton.jit
def _store(out, lane, left, kept, SIZE: tl.constexpr):
    if left >= SIZE:
        tl.store(out + lane, kept.to(tl.uint8))
    else:
        tl.store(out + lane, kept.to(tl.uint8), mask=lane < left)


@triton.jit
def _write_masks(
    begin, end, rows, info, state, chunk_ties, mask,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """Writes True where a key is above the k-th, and where it is equal if all ties are kept.

    If only some ties are kept, it writes the number of ties in each chunk. Keys below the k-th are
    zeroed, which changes no number of ties that another program counts at the same time.
    """
    lane = tl.arange(0, SIZE)
    current = tl.full([], -1, tl.int64)
    threshold = tl.zeros([], tl.int32)
    take = tl.full([], 1, tl.int32)
    bits, left, segment = _read(rows, begin, KEY, ALIGNED, SIZE)
    for chunk in range(begin, end):
        row = rows + chunk * ROW
        ahead = tl.where(chunk + 1 < end, chunk + 1, chunk)
        bits_ahead, left_ahead, segment_ahead = _read(rows, ahead, KEY, ALIGNED, SIZE)
        if segment != current:
            current = segment
            here = state + segment * STATE
            threshold = _fresh(here).to(tl.int32)
            take = (_fresh(here + 3) >= _fresh(here + 4)).to(tl.int32)
        key = _key(bits, lane, left, SIGN, SIZE)
        out = mask + tl.multiple_of(tl.load(row + 2), 16)
        _store(out, lane, left, key > threshold - take, SIZE)
        if ZERO:
            pointer, _ = _chunk(row, KEY, ALIGNED)
            kept = tl.where(key >= threshold, bits, 0)
            if left >= SIZE:
                tl.store(pointer + lane, kept)
            else:
                tl.store(pointer + lane, kept, mask=lane < left)
        if take == 0:
            if tl.load(info + tl.load(row + 4) * INFO + 2) > 1:
                ties = _ties_in_order(row, info, threshold, KEY, SIGN, ALIGNED, SIZE)
            else:  # memory order is row-major order
                ties = tl.sum((key == threshold).to(tl.int32))
            tl.store(chunk_ties + chunk, ties)
        bits = bits_ahead
        left = left_ahead
        segment = segment_ahead


@triton.jit
def _settle(
    chunk, rows, info, state, chunk_ties, ties_until, mask,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
    ZERO: tl.constexpr,
):  # fmt: skip
    """Rewrites the mask of a chunk that contains some of the first ties of its segment.

    Where values are zeroed, also chunks whose ties all come too late.
    """
    row = rows + chunk * ROW
    ties_here = _fresh(chunk_ties + chunk)
    about = info + tl.load(row + 4) * INFO
    ordered = tl.load(about + 2) == 1
    here = state + tl.load(row + 3) * STATE
    rank = _fresh(here + 3)
    if ((ties_here > 0) | (not ordered)) & (rank < _fresh(here + 4)):
        pointer, left = _chunk(row, KEY, ALIGNED)
        threshold = _fresh(here).to(tl.int32)
        out = mask + tl.multiple_of(tl.load(row + 2), 16)
        before = _fresh(ties_until + chunk) - ties_here
        if _fresh(ties_until + tl.load(about + 4)) <= rank:  # all ties of the tensor are kept
            lane = tl.arange(0, SIZE)
            key = _bits(pointer, lane, left, SIZE).to(tl.int32) & SIGN
            _store(out, lane, left, key >= threshold, SIZE)
        elif (ties_here > 0) & (ZERO | (before < rank)):
            _write_first(row, info, pointer, left, threshold, rank, before, out,
                         KEY, SIGN, SIZE, ZERO)  # fmt: skip
