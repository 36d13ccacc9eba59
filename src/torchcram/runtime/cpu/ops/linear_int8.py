"""Linear layers in 8 bits, and pairs of them with an activation between.

A layer is its packed matrix, the initial sum of each row (`start`), the scale of each row and its
bias.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.ops.common import pointer, register, require_rows
from torchcram.runtime.cpu.ops.linear import activation_number, fake_linear, run_on_tokens
from torchcram.runtime.cpu.packing import rows_of

LayerStruct = ctypes.Array[ctypes.c_int64]
"""A layer as the kernels take it: `LayerInt8` in packed.h."""


def _layer_struct(
    packed: Tensor, start: Tensor, scales: Tensor, bias: Tensor | None, *, prefix: str = ""
) -> LayerStruct:
    rows = rows_of(packed)
    require_rows(f"{prefix}start", start, rows, dtype=torch.int32)
    require_rows(f"{prefix}scales", scales, rows)
    require_rows(f"{prefix}bias", bias, rows)
    fields = (packed.data_ptr(), packed.numel(), rows, *map(pointer, (start, scales, bias)))
    return (ctypes.c_int64 * 6)(*(field or 0 for field in fields))


def _run_int8(
    x: Tensor,
    matrices: tuple[Tensor, ...],
    first: LayerStruct,
    second: LayerStruct | None,
    *,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, residual: int | None, y: int) -> int:
        return kernels().torchcram_linear_int8(  # type: ignore[no-any-return]
            *(x, tokens, inner, features, first, number, second, residual),
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
    layer = _layer_struct(packed, start, scales, bias)
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
    first = _layer_struct(packed, start, scales, bias)
    second = _layer_struct(then_packed, then_start, then_scales, then_bias, prefix="then_")
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
    fake=fake_linear,
    dense=_no_derivative,
)
register(
    "sparse_feed_forward_int8"
    f"(Tensor x, {_LAYER.format('')}, {_LAYER.format('then_')}, {_REST}) -> Tensor",
    _sparse_feed_forward_int8,
    fake=fake_linear,
    dense=_no_derivative,
)
