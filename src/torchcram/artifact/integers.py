"""Integers of a few bits: quantized weights as integers and scales, and integers packed into bytes.

A quantized weight is W = q s, rounded to its type. The largest |q| of a channel is 2^(bits-1) - 1,
so the largest |W| divided by that is s: for the scales of `Quantize` this division returns exactly
s, whatever the numbers. The code -2^(bits-1), which the quantizer leaves unused, stands for -0.0.

Packed integers have no gaps: integer i takes the bits from i * width on, lowest first. Eight
integers of `width` bits fit into one integer of 64 bits. Packing moves half of its content three
times, from a byte apart to next to each other; unpacking does the reverse.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from torchcram.kernels.cpu.decode import rows_of_table

PROBE = 8  # rows to try before all rows are tried
BITS = range(2, 9)
CHUNK = 1 << 17  # integers packed at a time, so that intermediate results stay in the cache


class Quantized(NamedTuple):
    """Integers and scales that stand for a tensor, exactly.

    Attributes:
        bits: Number of bits of an integer.
        group_size: Number of inputs that share a scale; None for all inputs of an output channel.
        codes: Integers in int8, in the order of the rows.
        scales: Scales, one per row.
    """

    bits: int
    group_size: int | None
    codes: Tensor
    scales: Tensor


def find_integers(view: Tensor, group_sizes: list[int | None]) -> Quantized | None:
    """Returns integers of the fewest bits that represent `view` exactly; None if there are none.

    Args:
        view: Tensor as (groups, outputs, *kernel positions, inputs), from `reduction_last`.
        group_sizes: Numbers of inputs that may share a scale, the likeliest first; those that do
            not divide the inputs are skipped.
    """
    if not view.dtype.is_floating_point or view.dtype.itemsize < 2 or not view.numel():
        return None
    for size in group_sizes:
        if size is not None and view.shape[-1] % size:
            continue
        rows = view.reshape(-1, view[0, 0].numel() if size is None else size)
        for bits in BITS:
            if fit(rows[:PROBE], bits) is not None and (fitted := fit(rows, bits)) is not None:
                codes, scales = fitted
                return Quantized(bits, size, codes.flatten(), scales)
    return None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that the quantizer computes in."""
    return torch.promote_types(dtype, torch.float32)


def read_integers(
    packed: Tensor, bits: int, places: slice, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns the floating-point numbers that some of the packed codes stand for."""
    start = places.start // 8 * 8  # at the start of a byte
    if 8 % bits == 0:
        codes = packed[start * bits // 8 : packed_size(places.stop, bits)]
        numbers = look_up(_table(bits, dtype), codes)
    else:
        codes = unpack_some(packed, bits, start, count=places.stop - start)
        numbers = _numbers(bits, dtype).index_select(0, codes.int())
    return numbers[places.start - start : places.stop - start]


@functools.cache
def _numbers(bits: int, dtype: torch.dtype) -> Tensor:
    """Returns the number that every code stands for."""
    sign = 1 << (bits - 1)
    return torch.tensor([*range(sign), -0.0, *range(1 - sign, 0)], dtype=dtype)


@functools.cache
def _table(bits: int, dtype: torch.dtype) -> Tensor:
    """Returns the numbers that every byte of codes stands for: (256, codes)."""
    codes = unpack(torch.arange(256).to(torch.uint8), bits, 256 * 8 // bits)
    return _numbers(bits, dtype)[codes.long()].view(256, -1)


def fit(rows: Tensor, bits: int) -> tuple[Tensor, Tensor] | None:
    """Returns codes and scales of (rows, inputs), or None if some row needs more bits.

    Args:
        rows: Rows, each with a scale of its own.
        bits: Number of bits of an integer.

    Returns:
        Codes in int8, -2^(bits-1) for -0.0, and one scale per row.
    """
    levels = (1 << (bits - 1)) - 1
    largest = rows.abs().amax(1, keepdim=True).to(wide(rows.dtype))
    scales = largest / torch.full_like(largest, levels)  # by a number, CUDA would round twice
    if not bool(torch.isfinite(scales).all()):
        return None
    scales = torch.where(scales == 0, 1, scales)
    q = (rows.to(scales.dtype) / scales).round_().clamp_(-levels, levels)
    if not bool(same_bits((q * scales).to(rows.dtype), rows).all()):
        return None
    minus_zero = torch.signbit(q) & (q == 0)
    codes = q.to(torch.int8).masked_fill_(minus_zero, -levels - 1)
    return codes, scales.squeeze(1)


def same_bits(first: Tensor, second: Tensor) -> Tensor:
    """Returns where two tensors of a type hold the same bits, also in zeros and NaN."""
    return as_integers(first) == as_integers(second)


def as_integers(tensor: Tensor) -> Tensor:
    """Views numbers as integers of their size."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.dtype.itemsize])


def packed_size(count: int, width: int) -> int:
    """Returns the number of bytes that `count` numbers of `width` bits take."""
    return (count * width + 7) // 8


def pack(numbers: Tensor, width: int) -> Tensor:
    """Packs numbers below 2^width, given and returned as uint8."""
    count = numbers.numel()
    packed = torch.empty(packed_size(count, width), dtype=torch.uint8)
    for start in range(0, count, CHUNK):
        some = numbers[start : start + CHUNK]
        eights = torch.zeros((len(some) + 7) // 8 * 8, dtype=torch.uint8)
        eights[: len(some)] = some
        words = eights.view(torch.int64)
        if width < 8:
            for half in (1, 2, 4):
                _halves(words, half * width, 8 * half, together=True)
        into = packed[start // 8 * width : packed_size(start + len(some), width)]
        into.copy_(words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)[: len(into)])
    return packed


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Returns `count` numbers that `pack` has packed."""
    numbers = torch.empty(count, dtype=torch.uint8)
    for start in range(0, count, CHUNK):
        into = numbers[start : start + CHUNK]
        into.copy_(unpack_some(packed, width, start, count=len(into)))
    return numbers


def unpack_some(packed: Tensor, width: int, start: int, *, count: int) -> Tensor:
    """Returns `count` numbers from `start` on, a multiple of 8."""
    if 8 % width == 0:
        some = packed[start * width // 8 : packed_size(start + count, width)]
        return look_up(_numbers_in_bytes(width), some)[:count]
    first, words = start // 8 * width, (count + 7) // 8
    some = packed[first : first + words * width]
    if len(some) < words * width:  # the last word is cut off
        some = torch.cat((some, some.new_zeros(words * width - len(some))))
    eights = torch.zeros(words, 8, dtype=torch.uint8)
    eights[:, :width] = some.view(-1, width)
    eights = eights.view(torch.int64).squeeze(1)
    for half in (4, 2, 1):
        _halves(eights, half * width, 8 * half, together=False)
    return eights.view(torch.uint8)[:count]


def look_up(table: Tensor, packed: Tensor) -> Tensor:
    """Returns the rows of a (256, n) table that bytes index, flattened to (bytes * n,)."""
    rows = rows_of_table(table, packed)
    if rows is not None:
        return rows.view(table.dtype)
    whole = _WHOLE.get(table.shape[1] * table.itemsize)
    if whole is None:
        return table.index_select(0, packed.int()).flatten()
    return table.view(whole).squeeze(1).index_select(0, packed.int()).view(table.dtype)


# copying a row as a single number is much faster
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@functools.cache
def _numbers_in_bytes(width: int) -> Tensor:
    """Returns the numbers of 1, 2, 4 or 8 bits that every byte holds: (256, numbers)."""
    shifts = torch.arange(0, 8, width)
    numbers = torch.arange(256).unsqueeze(1).bitwise_right_shift(shifts)
    return numbers.bitwise_and_((1 << width) - 1).to(torch.uint8)


def _halves(words: Tensor, near: int, far: int, *, together: bool) -> None:
    """Moves the upper half of every 2 * far bits to `near` bits above the lower, or back."""
    low = (1 << near) - 1
    at = far if together else near
    upper = words.bitwise_and(_repeated(low << at, 2 * far))
    if together:
        upper.bitwise_right_shift_(far - near)
    else:
        upper.bitwise_left_shift_(far - near)
    words.bitwise_and_(_repeated(low, 2 * far)).bitwise_or_(upper)


def _repeated(pattern: int, width: int) -> int:
    """Returns a pattern of bits, repeated to fill 64 bits, as a signed number."""
    word = sum(pattern << shift for shift in range(0, 64, width))
    return word - (1 << 64) if word >> 63 else word
