"""Few rows times a matrix in 8 bits, which is read once; reading it takes most of the time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    from torch import Tensor

MOST_ROWS = 64  # dense kernels are faster for more rows
ROWS, COLUMNS, DEEP = 16, (16, 32), 256  # size of a tile; tensor cores need at least 16 x 16
MANY = 3072  # outputs from which the wider tiles keep a GPU busy
ONE, LONG = 2, 1024  # outputs and inputs of a tile for a single row


@triton.jit
def _scaled(sums, scale, bias, output, valid, HAS_BIAS: tl.constexpr):
    sums = sums * tl.load(scale + output, mask=valid, other=0)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=valid, other=0).to(tl.float32)
    return sums


@triton.jit
def _one_row_kernel(x, values, scale, bias, y, outputs, inputs, HAS_BIAS: tl.constexpr,
                    WIDE: tl.constexpr, DEEP: tl.constexpr):  # fmt: skip
    """Writes (values x) scale + bias for a single row x."""
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
    """Writes (x values^T) scale + bias; each program computes a tile on tensor cores."""
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
        x: Inputs (rows, inputs) in bfloat16 or float16, contiguous; fast up to `MOST_ROWS` rows.
        values: Integers (outputs, inputs) in int8, contiguous.
        scale: Scales (outputs,) in float32.
        bias: Bias (outputs,), or None.
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
