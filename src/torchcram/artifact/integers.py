"""Quantized weights as the integers and scales they were made from.

A quantized weight is W = q s, rounded to its type. The largest |q| of a channel is 2^(bits-1) - 1,
so that the largest |W| divided by that is s: for the scales of `Quantize` this division gives s
back without an error, whatever the numbers. The code -2^(bits-1), which the quantizer leaves
unused, stands for -0.0.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from torchcram.artifact.bits import look_up, packed_size, unpack, unpack_some

PROBE = 8  # rows that have to fit before all of them are looked at
BITS = range(2, 9)


class Quantized(NamedTuple):
    """Integers and scales that stand for a tensor, exactly.

    Attributes:
        bits: of the integers.
        group_size: how many inputs share a scale; None for all of an output channel.
        codes: int8, in the order of the rows.
        scales: one per row.
    """

    bits: int
    group_size: int | None
    codes: Tensor
    scales: Tensor


def find_integers(view: Tensor, group_sizes: list[int | None]) -> Quantized | None:
    """Returns the fewest bits that give `view` back exactly, or None where there are none.

    Args:
        view: (groups, outputs, *kernel positions, inputs), as `reduction_last` gives it.
        group_sizes: that may share a scale, the likeliest first; those that do not fit are skipped.
    """
    if not view.dtype.is_floating_point or view.dtype.itemsize < 2 or not view.numel():
        return None
    for size in group_sizes:
        if size is not None and view.shape[-1] % size:
            continue
        rows = view.reshape(-1, view[0, 0].numel() if size is None else size)
        for bits in BITS:
            if fit(rows[:PROBE], bits) is not None and (found := fit(rows, bits)) is not None:
                codes, scales = found
                return Quantized(bits, size, codes.flatten(), scales)
    return None


def wide(dtype: torch.dtype) -> torch.dtype:
    """Returns the type that the quantizer computes in."""
    return torch.promote_types(dtype, torch.float32)


def read_integers(
    packed: Tensor, bits: int, places: slice, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Returns the numbers that some of the packed codes stand for, as floating point."""
    start = places.start // 8 * 8  # a whole byte
    if 8 % bits == 0:
        codes = packed[start * bits // 8 : packed_size(places.stop, bits)]
        numbers = look_up(_table(bits, dtype), codes)
    else:
        codes = unpack_some(packed, bits, start, count=places.stop - start)
        numbers = _numbers(bits, dtype).index_select(0, codes.int())
    return numbers[places.start - start : places.stop - start]


@functools.cache
def _numbers(bits: int, dtype: torch.dtype) -> Tensor:
    """What every code stands for."""
    sign = 1 << (bits - 1)
    return torch.tensor([*range(sign), -0.0, *range(1 - sign, 0)], dtype=dtype)


@functools.cache
def _table(bits: int, dtype: torch.dtype) -> Tensor:
    """What every byte of codes stands for: (256, codes)."""
    codes = unpack(torch.arange(256).to(torch.uint8), bits, 256 * 8 // bits)
    return _numbers(bits, dtype)[codes.long()].view(256, -1)


def fit(rows: Tensor, bits: int) -> tuple[Tensor, Tensor] | None:
    """Returns codes and scales of (rows, inputs), or None if some row needs more bits.

    Args:
        rows: each with a scale of its own.
        bits: of the integers.

    Returns:
        Codes in int8, -2^(bits-1) for -0.0, and one scale per row.
    """
    levels = (1 << (bits - 1)) - 1
    largest = rows.abs().amax(1, keepdim=True).to(wide(rows.dtype))
    scales = largest / torch.full_like(largest, levels)  # by a number, CUDA rounds twice
    if not bool(torch.isfinite(scales).all()):
        return None
    scales = torch.where(scales == 0, 1, scales)
    q = (rows.to(scales.dtype) / scales).round_().clamp_(-levels, levels)
    if not bool(same_bits((q * scales).to(rows.dtype), rows).all()):
        return None
    minus_zero = torch.signbit(q) & (q == 0)
    codes = q.to(torch.int8).masked_fill_(minus_zero, -levels - 1)
    return codes, scales.squeeze(1)


def same_bits(one: Tensor, other: Tensor) -> Tensor:
    """Returns where two tensors of a type hold the same bits, signs of zeros and NaN included."""
    return as_integers(one) == as_integers(other)


def as_integers(tensor: Tensor) -> Tensor:
    """Views numbers as integers of their size."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(sizes[tensor.dtype.itemsize])
