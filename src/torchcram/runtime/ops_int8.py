"""Sparse products in 8 bits as operators of torch.

`sparse_linear_int8` is one Linear layer, `sparse_feed_forward_int8` two with an activation between
them. A layer is given as its packed matrix, what each row starts from, its scales, and its bias.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from torchcram.native.library import kernels
from torchcram.runtime.ops import (
    activation_number,
    on_tokens,
    operators,
    output_shape,
    pointer,
    require_rows,
)
from torchcram.runtime.packing import rows_of

_LAYER = "Tensor {0}packed, Tensor {0}start, Tensor {0}scales, Tensor? {0}bias"
operators.define(
    f"sparse_linear_int8(Tensor x, {_LAYER.format('')}, Tensor? residual, int features, "
    "str activation) -> Tensor"
)
operators.define(
    f"sparse_feed_forward_int8(Tensor x, {_LAYER.format('')}, {_LAYER.format('then_')}, "
    "Tensor? residual, int features, str activation) -> Tensor"
)


def _layer(
    packed: Tensor, start: Tensor, scales: Tensor, bias: Tensor | None, *, prefix: str = ""
) -> ctypes.Array[ctypes.c_void_p]:
    rows = rows_of(packed)
    require_rows(f"{prefix}start", start, rows, dtype=torch.int32)
    require_rows(f"{prefix}scales", scales, rows)
    require_rows(f"{prefix}bias", bias, rows)
    tensors = (packed, start, scales, bias)
    return (ctypes.c_void_p * 4)(*map(pointer, tensors))


def _run(
    x: Tensor,
    first: ctypes.Array[ctypes.c_void_p],
    second: ctypes.Array[ctypes.c_void_p] | None,
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

    return on_tokens(run, x, residual, features=features)


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
    return _run(x, layer, None, residual=residual, features=features, activation=activation)


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
    return _run(x, first, second, residual=residual, features=features, activation=activation)


for _name, _kernel in (
    ("sparse_linear_int8", _sparse_linear_int8),
    ("sparse_feed_forward_int8", _sparse_feed_forward_int8),
):
    operators.impl(_name, _kernel, "CPU")
    torch.library.register_fake(f"torchcram::{_name}", output_shape(-2), lib=operators)
