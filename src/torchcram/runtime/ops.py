"""Sparse products as operators of torch, so that torch.compile and torch.export keep them.

Here are those of Linear layers; `torch.ops.torchcram` has them. The modules in
`torchcram.runtime.modules` call them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.native.library import kernels
from torchcram.runtime.packing import rows_of

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
    require_rows("bias", bias, rows_of(packed))
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_linear(  # type: ignore[no-any-return]
            *(x, tokens, inner, features, packed.data_ptr(), pointer(bias), more),
            *(number, y, torch.get_num_threads()),
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
    require_rows("bias", bias, rows_of(packed))
    require_rows("then_bias", then_bias, rows_of(then))
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_feed_forward(  # type: ignore[no-any-return]
            *(x, tokens, inner, features, packed.data_ptr(), pointer(bias)),
            *(number, then.data_ptr(), pointer(then_bias), more, y),
            torch.get_num_threads(),
        )

    return on_tokens(run, x, residual, features=features)


def output_shape(features_at: int) -> Callable[..., Tensor]:
    """Returns what tells torch the outputs of an operator: as the inputs, with so many features.

    Args:
        features_at: which of the arguments after the inputs says how many.
    """

    def shape(x: Tensor, *rest: int) -> Tensor:
        return x.new_empty((*x.shape[:-1], rest[features_at]))

    return shape


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

    Raises:
        ValueError: if the packed matrix, the inputs and the residual do not fit together.
    """
    require_floats(x)
    if x.dim() == 0:
        raise ValueError("x is a single number: it takes at least one dimension")
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
        ValueError: if it is not float32, or of another shape.
    """
    require_floats(residual)
    try:
        return residual.expand(y.shape)
    except RuntimeError:
        given, allowed = tuple(residual.shape), tuple(y.shape)
        raise ValueError(
            f"residual is of shape {given}, which does not fit outputs of {allowed}"
        ) from None


def pointer(tensor: Tensor | None) -> int | None:
    """Returns where a tensor lies, or None where there is none."""
    return None if tensor is None else tensor.data_ptr()


def activation_number(name: str) -> int:
    """Returns the number that the kernels know an activation by.

    Raises:
        ValueError: if they do not know it.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {ACTIVATIONS}")
    return ACTIVATIONS.index(name)


def require_rows(
    name: str, tensor: Tensor | None, rows: int, *, dtype: torch.dtype = torch.float32
) -> None:
    """Makes sure that the kernels can read one value per row, where there is a tensor.

    Args:
        name: of the tensor.
        tensor: one dimension, contiguous.
        rows: of the packed matrix.
        dtype: what the kernels take it for.

    Raises:
        ValueError: if it is another one.
    """
    if tensor is None:
        return
    together = tensor.is_contiguous()
    if tensor.dtype != dtype or tensor.shape != (rows,) or not together:
        given = f"{tuple(tensor.shape)} and {tensor.dtype}{'' if together else ', not contiguous'}"
        raise ValueError(f"{name} is of shape {given}: it takes {rows} values of {dtype}")


def require_floats(x: Tensor) -> None:
    """Makes sure that the kernels can read `x`.

    Raises:
        ValueError: if it is not float32.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"sparse kernels work on float32, not {x.dtype}")


for _name, _run, _at in (
    ("sparse_linear", _sparse_linear, -2),
    ("sparse_feed_forward", _sparse_feed_forward, -1),
):
    operators.impl(_name, _run, "CPU")
    torch.library.register_fake(f"torchcram::{_name}", output_shape(_at), lib=operators)
