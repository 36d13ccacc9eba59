"""Masks from thresholds; among keys equal to the k-th, position decides."""

from __future__ import annotations

import triton
import triton.language as tl

from torchcram.kernels.cuda.access import _bits, _chunk, _fresh, _key, _read
from torchcram.kernels.cuda.rank import STATE
from torchcram.kernels.cuda.table import INFO, ROW, SEGMENT

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
def _ties_in_order(row, info, threshold, KEY: tl.constexpr, SIGN: tl.constexpr,
                   ALIGNED: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    # the keys equal to the threshold in a chunk of the row-major order
    pointer, left = _chunk(row, KEY, ALIGNED)
    ties = tl.zeros([PART], tl.int32)
    for start in range(0, SIZE, PART):
        part = start + tl.arange(0, PART)
        key, _ = _keys_in_order(row, info, pointer, part, left, SIGN)
        ties += ((key == threshold) & (part < left)).to(tl.int32)
    return tl.sum(ties)


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
def _store(out, place, left, kept, SIZE: tl.constexpr):
    if left >= SIZE:
        tl.store(out + place, kept.to(tl.uint8))
    else:
        tl.store(out + place, kept.to(tl.uint8), mask=place < left)


@triton.jit
def _write_masks(
    begin, end, rows, info, state, found, mask,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes True where a key is above the k-th, and for those equal to it if all are kept.

    Where only some are kept, writes how many there are in each chunk.
    """
    place = tl.arange(0, SIZE)
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
        key = _key(bits, place, left, SIGN, SIZE)
        out = mask + tl.multiple_of(tl.load(row + 2), 16)
        _store(out, place, left, key > threshold - take, SIZE)
        if take == 0:
            if tl.load(info + tl.load(row + 4) * INFO + 2) > 1:
                ties = _ties_in_order(row, info, threshold, KEY, SIGN, ALIGNED, SIZE)
            else:  # the order in memory is that of the index
                ties = tl.sum((key == threshold).to(tl.int32))
            tl.store(found + chunk, ties)
        bits = bits_ahead
        left = left_ahead
        segment = segment_ahead


@triton.jit
def _settle(
    chunk, rows, info, state, found, until, mask,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Writes the mask of a chunk again if the first ties of its segment, by position, are in it."""
    row = rows + chunk * ROW
    here_found = _fresh(found + chunk)
    about = info + tl.load(row + 4) * INFO
    ordered = tl.load(about + 2) == 1
    here = state + tl.load(row + 3) * STATE
    rank = _fresh(here + 3)
    if ((here_found > 0) | (not ordered)) & (rank < _fresh(here + 4)):
        pointer, left = _chunk(row, KEY, ALIGNED)
        threshold = _fresh(here).to(tl.int32)
        out = mask + tl.multiple_of(tl.load(row + 2), 16)
        before = _fresh(until + chunk) - here_found
        if _fresh(until + tl.load(about + 4)) <= rank:  # all ties of the tensor
            place = tl.arange(0, SIZE)
            key = _bits(pointer, place, left, SIZE).to(tl.int32) & SIGN
            _store(out, place, left, key >= threshold, SIZE)
        elif (here_found > 0) & (before < rank):
            _write_first(row, info, pointer, left, threshold, rank, before, out, SIGN, SIZE)
