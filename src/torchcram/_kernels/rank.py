"""The k-th largest key of every segment.

A sample of the keys tells about where it is, as an interval. Every pass counts the keys of the
interval in BINS bins and goes on with the bin that holds the k-th, until bins are one key wide. A
sample that misleads costs further passes and nothing else.

    rank   how many keys of the interval are to be kept
    ties   how many keys equal the k-th
    guess  the key that the sample takes for the k-th
    above  how many keys lie above the first interval
"""

from __future__ import annotations

import triton
import triton.language as tl

from torchcram._kernels.access import _chunk, _fresh, _keys
from torchcram._kernels.table import ROW, SEGMENT

BINS = tl.constexpr(2048)
SAMPLE = tl.constexpr(4096)
PASSES = tl.constexpr(4)  # enough for any key: BINS ** 3 > 2 ** 31, and one if the sample misleads
STATE = tl.constexpr(8)  # of a segment: low, last, shift, rank, ties, known, guess, above


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
def _count(
    begin, end, rows, state, counts, first, COPIES: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
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
    for chunk in range(begin, end):
        row = rows + chunk * ROW
        pointer, left = _chunk(row, KEY, ALIGNED)
        segment = tl.load(row + 3)
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
