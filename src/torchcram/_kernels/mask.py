"""Masks from thresholds; among keys equal to the k-th, position decides."""

from __future__ import annotations

import triton
import triton.language as tl

from torchcram._kernels.access import _chunk, _fresh, _keys
from torchcram._kernels.rank import STATE
from torchcram._kernels.table import INFO, ROW, SEGMENT

PART = tl.constexpr(1024)  # elements at a time where they are taken in order


@triton.jit
def _in_order(index, channels, spatial):
    # where the index-th element in row-major order lies in memory
    row = index // (channels * spatial)
    rest = index - row * channels * spatial
    channel = rest // spatial
    return row * channels * spatial + (rest - channel * spatial) * channels + channel


@triton.jit
def _keys_in_order(row, info, pointer, place, left, SIGN: tl.constexpr):
    # the keys of a chunk in row-major order, and where they lie relative to `pointer`
    about = info + tl.load(row + 4) * INFO
    spatial = tl.load(about + 2)
    where = place.to(tl.int64)
    if spatial > 1:
        start = tl.load(about) - left
        where = _in_order(start + place, tl.load(about + 1), spatial) - start
    bits = tl.load(pointer + where, mask=place < left, other=0)
    return bits.to(tl.int32) & SIGN, where


@triton.jit
def _count_ties(
    chunk, rows, info, state, found,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Counts the keys of a chunk that equal the k-th, where not all of them are kept."""
    row = rows + chunk * ROW
    pointer, left = _chunk(row, KEY, ALIGNED)
    here = state + tl.load(row + 3) * STATE
    if _fresh(here + 3) < _fresh(here + 4):
        threshold = _fresh(here).to(tl.int32)
        if tl.load(info + tl.load(row + 4) * INFO + 2) > 1:
            ties = tl.zeros([PART], tl.int32)
            for start in range(0, SIZE, PART):
                part = start + tl.arange(0, PART)
                ordered, _ = _keys_in_order(row, info, pointer, part, left, SIGN)
                ties += ((ordered == threshold) & (part < left)).to(tl.int32)
            tl.store(found + chunk, tl.sum(ties))
        else:  # the order in memory is that of the index
            place = tl.arange(0, SIZE)
            key = _keys(pointer, place, left, SIGN, SIZE)
            tied = (key == threshold) & (place < left)
            tl.store(found + chunk, tl.sum(tied.to(tl.int32)))


@triton.jit
def _write_first(row, info, pointer, left, threshold, rank, earlier, out,
                 SIGN: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    """Writes the mask of a chunk in which only the first of the ties are kept."""
    for start in range(0, SIZE, PART):
        place = start + tl.arange(0, PART)
        key, where = _keys_in_order(row, info, pointer, place, left, SIGN)
        tied = ((key == threshold) & (place < left)).to(tl.int32)
        first = (tied > 0) & (earlier + tl.cumsum(tied, 0) <= rank)
        tl.store(out + where, ((key > threshold) | first).to(tl.uint8), mask=place < left)
        earlier += tl.sum(tied)


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
def _write_mask(
    chunk, rows, info, state, found, until, mask,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
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
            before = _fresh(until + chunk) - _fresh(found + chunk)
            _write_first(row, info, pointer, left, threshold, rank, before, out, SIGN, SIZE)
    if not partly:
        kept = ((key > threshold) | ((key == threshold) & take)).to(tl.uint8)
        if left >= SIZE:
            tl.store(out + place, kept)
        else:
            tl.store(out + place, kept, mask=place < left)
