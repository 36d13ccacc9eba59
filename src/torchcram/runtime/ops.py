"""Sparse products as operators of torch, so that torch.compile and torch.export keep them.

Here are those of Linear layers; `torch.ops.torchcram` has them. The modules in
`torchcram.runtime.modules` call them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchcram.native.library import kernels

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

operators = torch.library.Library("torchcram", "FRAGMENT")
operators.define(
    "sparse_linear(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, int features, "
    "str activation) -> Tensor"
)
operators.define(
    "sparse_feed_forward(Tensor x, Tensor packed, Tensor? bias, str activation, Tensor then, "
    "Tensor? then_bias, Tensor? residual, int features) -> Tensor"
)


def _sparse_linear(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    require_floats(x)
    x = x.contiguous()
    inner = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], features))
    tokens = x.numel() // inner if inner else 0
    if residual is not None:
        residual = residual.expand(y.shape).contiguous()
    good = tokens == 0 or kernels().torchcram_linear(
        x.data_ptr(),
        tokens,
        inner,
        features,
        packed.data_ptr(),
        pointer(bias),
        pointer(residual),
        ACTIVATIONS.index(activation),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    if not good:
        raise ValueError(f"the packed matrix does not map {inner} features to {features}")
    return y


def _sparse_feed_forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    then: Tensor,
    then_bias: Tensor | None,
    residual: Tensor | None,
    features: int,
) -> Tensor:
    require_floats(x)
    x = x.contiguous()
    inner = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], features))
    if residual is not None:
        residual = residual.expand(y.shape).contiguous()
    good = x.numel() == 0 or kernels().torchcram_feed_forward(
        x.data_ptr(),
        x.numel() // inner,
        inner,
        features,
        packed.data_ptr(),
        pointer(bias),
        ACTIVATIONS.index(activation),
        then.data_ptr(),
        pointer(then_bias),
        pointer(residual),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    if not good:
        raise ValueError(f"the packed matrices do not map {inner} features to {features}")
    return y


def _sparse_linear_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    _activation: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def _sparse_feed_forward_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _activation: str,
    _then: Tensor,
    _then_bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


def pointer(tensor: Tensor | None) -> int | None:
    """Returns where a tensor lies, or None where there is none."""
    return None if tensor is None else tensor.data_ptr()


def require_floats(x: Tensor) -> None:
    """Makes sure that the kernels can read `x`.

    Raises:
        ValueError: if it is not float32.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"sparse kernels work on float32, not {x.dtype}")


for _name, _run, _shape in (
    ("sparse_linear", _sparse_linear, _sparse_linear_shape),
    ("sparse_feed_forward", _sparse_feed_forward, _sparse_feed_forward_shape),
):
    operators.impl(_name, _run, "CPU")
    torch.library.register_fake(f"torchcram::{_name}", _shape, lib=operators)
