"""How programs read chunks, and wait for one another."""

from __future__ import annotations

import triton
import triton.language as tl

from torchcram.kernels.cuda.table import ROW


@triton.jit
def _chunk(row, KEY: tl.constexpr, ALIGNED: tl.constexpr):
    # (address, elements up to the end of the tensor)
    pointer = tl.load(row).to(tl.pointer_type(KEY))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer, tl.load(row + 1)


@triton.jit
def _bits(pointer, place, left, SIZE: tl.constexpr):
    # a whole chunk loads without a mask, in vectors
    if left >= SIZE:
        bits = tl.load(pointer + place)
    else:
        bits = tl.load(pointer + place, mask=place < left, other=0)
    return bits


@triton.jit
def _read(rows, chunk, KEY: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Reads a chunk: its bits, the elements up to the end of its tensor, its segment."""
    row = rows + chunk * ROW
    pointer, left = _chunk(row, KEY, ALIGNED)
    return _bits(pointer, tl.arange(0, SIZE), left, SIZE), left, tl.load(row + 3)


@triton.jit
def _key(bits, place, left, SIGN: tl.constexpr, SIZE: tl.constexpr):
    # -1 beyond the end of a tensor
    key = bits.to(tl.int32) & SIGN
    if left < SIZE:
        key = tl.where(place < left, key, -1)
    return key


@triton.jit
def _fresh(pointer):
    # reads what other programs have written: past the first-level cache
    return tl.load(pointer, cache_modifier=".cg")


@triton.jit
def _wait_for_all(arrivals, turn, programs):
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="acq_rel")
    while tl.atomic_add(arrivals, 0, sem="acq_rel") < turn * programs:
        pass
    tl.debug_barrier()
