"""Sparse products as operators of torch, so that torch.compile and torch.export keep them.

Here are those of Linear layers; `torch.ops.torchcram` has them. The modules in
`torchcram.runtime.modules` call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.native.library import kernels

if TYPE_CHECKING:
    from collections.abc import Callable

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
    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_linear(  # type: ignore[no-any-return]
            *(x, tokens, inner, features, packed.data_ptr(), pointer(bias), more),
            *(ACTIVATIONS.index(activation), y, torch.get_num_threads()),
        )

    return on_tokens(run, x, residual, features=features)


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
    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_feed_forward(  # type: ignore[no-any-return]
            *(x, tokens, inner, features, packed.data_ptr(), pointer(bias)),
            *(ACTIVATIONS.index(activation), then.data_ptr(), pointer(then_bias), more),
            *(y, torch.get_num_threads()),
        )

    return on_tokens(run, x, residual, features=features)


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


def on_tokens(
    run: Callable[[int, int, int, int | None, int], int],
    x: Tensor,
    residual: Tensor | None,
    *,
    features: int,
) -> Tensor:
    """Runs a kernel that maps the last dimension of `x` to so many features.

    Args:
        run: given where the tokens are, how many, of how many features, where the residual is, and
            where the outputs go; returns 0 where the packed matrix is not one for that.
        x: any number of dimensions.
        residual: what is added to the outputs.
        features: of the outputs.
    """
    require_floats(x)
    x = x.contiguous()
    inner = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], features))
    residual = None if residual is None else as_large_as(y, residual).contiguous()
    if x.numel() and not run(
        x.data_ptr(), x.numel() // inner, inner, pointer(residual), y.data_ptr()
    ):
        raise ValueError(
            f"the packed matrix does not map {inner} features to {features}, or there is no kernel "
            "for it here"
        )
    return y


def as_large_as(y: Tensor, residual: Tensor) -> Tensor:
    """Returns a residual in the shape of the outputs `y`.

    Raises:
        ValueError: if it is not float32.
    """
    require_floats(residual)
    return residual.expand(y.shape)


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
