"""Linear layers in 8 bits.

A layer is its packed matrix, the initial sum of each row, its scales and its bias.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.ops.common import pointer, register, require_rows
from torchcram.runtime.cpu.ops.linear import activation_number, linear_shape, run_on_tokens
from torchcram.runtime.cpu.packing import rows_of

Layer = ctypes.Array[ctypes.c_int64]
"""A layer as the kernels take it: `LayerInt8` in packed.h."""


def _layer(
    packed: Tensor, start: Tensor, scales: Tensor, bias: Tensor | None, *, prefix: str = ""
) -> Layer:
    rows = rows_of(packed)
    require_rows(f"{prefix}start", start, rows, dtype=torch.int32)
    require_rows(f"{prefix}scales", scales, rows)
    require_rows(f"{prefix}bias", bias, rows)
    numbers = (packed.data_ptr(), packed.numel(), rows, *map(pointer, (start, scales, bias)))
    return (ctypes.c_int64 * 6)(*(number or 0 for number in numbers))


def _run_int8(
    x: Tensor,
    matrices: tuple[Tensor, ...],
    first: Layer,
    second: Layer | None,
    *,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_linear_int8(  # type: ignore[no-any-return]
            *(x, tokens, inner, features, first, number, second, more),
            *(y, torch.get_num_threads()),
        )

    rows = rows_of(matrices[-1])
    return run_on_tokens(run, matrices, x, residual, features=features, rows=rows)


def _sparse_linear_int8(
    x: Tensor,
    packed: Tensor,
    start: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    layer = _layer(packed, start, scales, bias)
    return _run_int8(
        x, (packed,), layer, None, residual=residual, features=features, activation=activation
    )


def _sparse_feed_forward_int8(
    x: Tensor,
    packed: Tensor,
    start: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    then_packed: Tensor,
    then_start: Tensor,
    then_scales: Tensor,
    then_bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    first = _layer(packed, start, scales, bias)
    second = _layer(then_packed, then_start, then_scales, then_bias, prefix="then_")
    matrices = (packed, then_packed)
    return _run_int8(
        x, matrices, first, second, residual=residual, features=features, activation=activation
    )


def _no_derivative(*_: object) -> Tensor:
    raise RuntimeError(
        "sparse layers in 8 bits have no derivatives, because they round their inputs: run them "
        "under torch.no_grad(), or prepare the model without int8=True"
    )


_LAYER = "Tensor {0}packed, Tensor {0}start, Tensor {0}scales, Tensor? {0}bias"
_REST = "Tensor? residual, int features, str activation"
register(
    f"sparse_linear_int8(Tensor x, {_LAYER.format('')}, {_REST}) -> Tensor",
    _sparse_linear_int8,
    shape=linear_shape,
    dense=_no_derivative,
)
register(
    "sparse_feed_forward_int8"
    f"(Tensor x, {_LAYER.format('')}, {_LAYER.format('then_')}, {_REST}) -> Tensor",
    _sparse_feed_forward_int8,
    shape=linear_shape,
    dense=_no_derivative,
)
