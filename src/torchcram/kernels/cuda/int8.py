"""Few rows times a matrix of 8 bits: what takes the time is to read the matrix, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 64  # from there on, dense kernels are faster
ROWS, COLUMNS, DEEP = 16, (16, 32), 256  # of a tile: the least that tensor cores take
MANY = 3072  # outputs, from which the wider tiles still keep a GPU busy
ONE, LONG = 2, 1024  # outputs and inputs at a time, for one row


@triton.jit
def _scaled(sums, scale, bias, output, valid, HAS_BIAS: tl.constexpr):
    sums = sums * tl.load(scale + output, mask=valid, other=0)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=valid, other=0).to(tl.float32)
    return sums


@triton.jit
def _one_row_kernel(x, values, scale, bias, y, outputs, inputs, HAS_BIAS: tl.constexpr,
                    WIDE: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """Writes (values x) scale + bias for one x."""
    output = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    valid = output < outputs
    rows = values + output.to(tl.int64)[:, None] * inputs
    sums = tl.zeros([WIDE, DEEP], tl.float32)
    for start in range(0, inputs, DEEP):
        column = start + tl.arange(0, DEEP)
        inside = column < inputs
        part = tl.load(rows + column[None, :], mask=valid[:, None] & inside[None, :], other=0)
        factor = tl.load(x + column, mask=inside, other=0).to(tl.float32)
        sums += part.to(tl.float32) * factor[None, :]
    result = _scaled(tl.sum(sums, 1), scale, bias, output, valid, HAS_BIAS)
    tl.store(y + output, result.to(y.dtype.element_ty), mask=valid)


@triton.jit
def _rows_kernel(x, values, scale, bias, y, count, outputs, inputs, HAS_BIAS: tl.constexpr,
                 ROWS: tl.constexpr, WIDE: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """Writes (x values^T) scale + bias, a tile on tensor cores per program."""
    output = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    valid, there = output < outputs, row < count
    left = x + row[:, None] * inputs
    right = values + output.to(tl.int64)[None, :] * inputs
    sums = tl.zeros([ROWS, WIDE], tl.float32)
    for start in range(0, inputs, DEEP):
        column = start + tl.arange(0, DEEP)
        inside = column < inputs
        part = tl.load(right + column[:, None], mask=inside[:, None] & valid[None, :], other=0)
        factor = tl.load(left + column[None, :], mask=there[:, None] & inside[None, :], other=0)
        sums += tl.dot(factor, part.to(factor.dtype))
    result = _scaled(sums, scale, bias, output[None, :], valid[None, :], HAS_BIAS)
    element = row[:, None] * outputs + output[None, :]
    tl.store(y + element, result.to(y.dtype.element_ty), mask=there[:, None] & valid[None, :])


def multiply_int8(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Returns (x values^T) scale + bias.

    Args:
        x: (rows, inputs) in bfloat16 or float16, contiguous; fast up to `MOST_ROWS` rows.
        values: (outputs, inputs) in int8, contiguous.
        scale: (outputs,) in float32.
        bias: (outputs,), or None.
    """
    (count, inputs), outputs = x.shape, len(values)
    y = x.new_empty(count, outputs)
    if count == 0 or outputs == 0:
        return y
    given = (x, values, scale, scale if bias is None else bias, y)
    if count == 1:
        _one_row_kernel[triton.cdiv(outputs, ONE),](
            *given, outputs, inputs, bias is not None, ONE, LONG, num_warps=4
        )
        return y
    wide = COLUMNS[outputs >= MANY]
    grid = (triton.cdiv(outputs, wide), triton.cdiv(count, ROWS))
    _rows_kernel[grid](
        *given, count, outputs, inputs, bias is not None, ROWS, wide, DEEP,
        num_warps=4, num_stages=3 if outputs >= MANY else 4,
    )  # fmt: skip
    return y
