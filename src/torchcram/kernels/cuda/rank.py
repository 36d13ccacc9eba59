"""The k-th largest key of every segment.

A sample of the keys tells about where it is, as an interval; where there are many, a look at part
of the chunks makes that interval narrow. Then passes over all chunks count the keys of the interval
in fine bins, which add up to coarse ones, and go on with the bin that holds the k-th, until it is
one key wide: mostly after the first. A sample that misleads costs further passes, nothing else.

    rank   how many keys of the interval are to be kept
    ties   how many keys equal the k-th
    guess  the key that the sample takes for the k-th
    above  how many keys lie above the interval
    seen   how many keys the look at part of the chunks took in
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchcram.kernels.cuda.access import _fresh, _key, _read
from torchcram.kernels.cuda.table import ROW, SEGMENT

BINS = tl.constexpr(2048)  # coarse ones; each is up to 2 ** DEPTH fine ones
SAMPLE = tl.constexpr(1024)
PASSES = tl.constexpr(4)  # enough for any key: BINS ** 3 > 2 ** 31, and one if the sample misleads
STATE = tl.constexpr(9)  # of a segment: low, last, shift, rank, ties, known, guess, above, seen


@triton.jit
def _narrow(here, low, last):
    # stores an interval, with coarse bins just wide enough to cover it
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
def _bins(here, counts, segment, copy, DEPTH: tl.constexpr):
    """Where a program counts: an interval of no more than BINS keys has room for many copies."""
    bins = counts + segment * (BINS << DEPTH)
    return bins + tl.where(_fresh(here + 2) == 0, copy * BINS, 0)


@triton.jit
def _flush(here, bins, known, often, above, seen, first, DEPTH: tl.constexpr):
    # hands the sums of a program over to its segment
    if known == 0:
        guess = _fresh(here + 6)
        low = _fresh(here)
        if (often > 0) & (guess >= low) & (guess <= _fresh(here + 1)):
            place = (guess - low) >> tl.maximum(_fresh(here + 2) - DEPTH, 0)
            tl.atomic_add(bins + place, often.to(tl.int32), sem="relaxed")
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
    place = tl.arange(0, SIZE)
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
        # the next chunk is on its way while this one is counted
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
            offset = _key(bits, place, left, SIGN, SIZE) - low  # from -2 ** 31 to 2 ** 31 - 1
            # one key may make up much of a tensor (zero, a level of a quantizer): added up first
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
    """Adds up the fine bins of every coarse one, or its copies; shared among all programs."""
    for block in range(me, segment_count * PARTS, programs):
        segment = block // PARTS
        here = state + segment * STATE
        if _fresh(here + 5) == 0:
            shift = _fresh(here + 2)
            deep = shift - tl.maximum(shift - DEPTH, 0)
            bin_ = (block - segment * PARTS) * (BINS // PARTS) + tl.arange(0, BINS // PARTS)
            place = tl.arange(0, 1 << DEPTH)[None, :]
            # fine bins lie together, copies BINS apart
            apart = place * BINS + bin_[:, None]
            together = (bin_[:, None].to(tl.int64) << deep) + place
            bins = counts + (segment + tl.zeros([], tl.int64)) * (BINS << DEPTH)
            where = tl.where(shift == 0, apart, together)
            inside = place + 0 * bin_[:, None] < tl.where(shift == 0, 1 << DEPTH, 1 << deep)
            count = tl.load(bins + where, mask=inside, other=0, cache_modifier=".cg")
            tl.store(coarse + segment * BINS + bin_, tl.sum(count, 1))


@triton.jit
def _refine(segment, segments, state, coarse):
    """Narrows the interval to what part of the chunks says, give or take eight deviations."""
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
        margin = 8 * tl.sqrt(rank * (1 - rank / seen)) + 8
        at_or_above = above + tl.sum(count) - tl.cumsum(count, 0) + count
        lower = tl.sum((at_or_above >= (rank + margin).to(tl.int64)).to(tl.int64)) - 1
        upper = tl.sum((at_or_above >= (rank - margin).to(tl.int64)).to(tl.int64))
        if rank - margin > above.to(tl.float32):
            last = tl.minimum(last, low + (tl.maximum(upper, 1) << shift) - 1)
        _narrow(here, low + (tl.maximum(lower, 0) << shift), last)
        tl.store(here + 7, 0)


@triton.jit
def _descend(segment, state, counts, coarse, unknown, unsettled, first,
             DEPTH: tl.constexpr, SIGN: tl.constexpr):  # fmt: skip
    """Goes on with the bin that holds the k-th key, or beside an interval that does not."""
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
                place = tl.arange(0, 1 << DEPTH)
                within = place < (1 << (shift - finer))
                fine = counts + (segment + tl.zeros([], tl.int64)) * (BINS << DEPTH)
                fine += (chosen << (shift - finer)) + place
                deeper = tl.load(fine, mask=within, other=0, cache_modifier=".cg")
                chosen, rank, ties = _bin_of(deeper.to(tl.int64), place, rank)
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
def _bin_of(count, place, rank):
    # (the bin that holds the key of that rank from above, its rank there, the keys there)
    at_or_above = tl.sum(count) - tl.cumsum(count, 0) + count
    chosen = tl.sum((at_or_above >= rank).to(tl.int64)) - 1
    rank -= tl.sum(tl.where(place > chosen, count, 0))
    return chosen, rank, tl.sum(tl.where(place == chosen, count, 0))
