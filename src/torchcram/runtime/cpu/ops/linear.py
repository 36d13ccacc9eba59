"""Linear layers, and pairs of them with an activation between."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.activation_memory import empty_activations
from torchcram.runtime.cpu.ops.common import (
    expand_residual,
    pointer,
    register,
    require_floats,
    require_rows,
)
from torchcram.runtime.cpu.packing import check_packed, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")


def activation_number(name: str) -> int:
    """Returns the number of an activation in the C interface.

    Raises:
        ValueError: If there is no kernel for it.
    """
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is not one of {ACTIVATIONS}")
    return ACTIVATIONS.index(name)


def run_on_tokens(
    run: Callable[[int, int, int, int | None, int], int],
    matrices: tuple[Tensor, ...],
    x: Tensor,
    residual: Tensor | None,
    *,
    features: int,
    rows: int,
) -> Tensor:
    """Runs a kernel that maps the last dimension of `x` to another number of features.

    Args:
        run: Kernel. It is called with the address of the inputs, the number of tokens and of input
            features, and the addresses of the residual and of the outputs. It returns 0 if the
            packed matrix has another shape.
        matrices: Packed matrices that the kernel uses.
        x: Inputs (..., features).
        residual: Tensor that is added to the outputs, or None.
        features: Number of output features.
        rows: Number of rows of the last matrix.

    Raises:
        ValueError: If the packed matrix, the inputs and the residual do not fit together.
    """
    _require_tokens(x)
    x = x.contiguous()
    inner = x.shape[-1]
    y = empty_activations((*x.shape[:-1], features))
    residual = None if residual is None else expand_residual(y, residual).contiguous()
    tokens = math.prod(x.shape[:-1])
    computed = rows == features and run(
        x.data_ptr(), tokens, inner, pointer(residual), y.data_ptr()
    )
    if not computed:
        for packed in matrices:  # raises if it was overwritten without torch noticing
            check_packed(packed)
        raise ValueError(
            f"the packed matrix does not map {inner} features to {features}, or this "
            "machine has no kernel for it"
        )
    return y


def _require_tokens(x: Tensor) -> None:
    require_floats(x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension, got a scalar")


def fake_linear(x: Tensor, *rest: int) -> Tensor:
    """Returns empty outputs of an operator whose schema ends in `int features, str activation`."""
    features = rest[-2]
    return x.new_empty((*x.shape[:-1], features))


def _sparse_linear(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    rows = rows_of(packed)
    require_rows("bias", bias, rows)
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, residual: int | None, y: int) -> int:
        return kernels().torchcram_linear(  # type: ignore[no-any-return]
            *(x, tokens, inner, rows, packed.data_ptr(), packed.numel(), pointer(bias), residual),
            *(number, y, torch.get_num_threads()),
        )

    return run_on_tokens(run, (packed,), x, residual, features=features, rows=rows)


def _dense_linear(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    activation: str,
) -> Tensor:
    _require_tokens(x)
    weight = unpack_linear(packed, x.shape[-1], features)
    y = _activate(functional.linear(x, weight, bias), activation)
    return y if residual is None else y + expand_residual(y, residual)


def unpack_linear(packed: Tensor, inputs: int, features: int) -> Tensor:
    """Returns the dense weight (features, inputs) of a packed matrix.

    Args:
        packed: Packed matrix of a Linear layer.
        inputs: Number of columns.
        features: Number of rows.

    Raises:
        ValueError: If the packed matrix has another number of rows or columns.
    """
    columns: Tensor = torch.ops.torchcram.sparse_linear(
        torch.eye(inputs, device=packed.device), packed, None, None, features, "none"
    )
    return columns.t().contiguous()


def _activate(x: Tensor, activation: str) -> Tensor:
    activation_number(activation)  # raises for an unknown activation
    if activation.startswith("gelu"):
        return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "silu":
        return functional.silu(x)
    return functional.relu(x) if activation == "relu" else x


register(
    "sparse_linear(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, int features, "
    "str activation) -> Tensor",
    _sparse_linear,
    fake=fake_linear,
    dense=_dense_linear,
)


def _sparse_feed_forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    then: Tensor,
    then_bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    middle: int | None = None,
) -> Tensor:
    first_rows, rows = rows_of(packed), rows_of(then)
    require_rows("bias", bias, first_rows)
    require_rows("then_bias", then_bias, rows)
    if middle not in (None, first_rows):
        raise ValueError(f"the first packed matrix has {first_rows} rows, not {middle}")
    number = activation_number(activation)

    def run(x: int, tokens: int, inner: int, residual: int | None, y: int) -> int:
        return kernels().torchcram_feed_forward(  # type: ignore[no-any-return]
            *(x, tokens, inner, first_rows, rows, packed.data_ptr(), packed.numel()),
            *(pointer(bias), number, then.data_ptr(), then.numel(), pointer(then_bias)),
            *(residual, y, torch.get_num_threads()),
        )

    return run_on_tokens(run, (packed, then), x, residual, features=features, rows=rows)


def _fake_feed_forward(x: Tensor, *rest: int) -> Tensor:
    features = rest[6]  # `middle` follows unless it has its default
    return x.new_empty((*x.shape[:-1], features))


def _dense_feed_forward(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    activation: str,
    then: Tensor,
    then_bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    middle: int | None = None,
) -> Tensor:
    if middle is None:  # always given in a trace, in which `packed` has no data
        middle = rows_of(packed)
    h = _dense_linear(x, packed, bias, None, middle, activation)
    return _dense_linear(h, then, then_bias, residual, features, "none")


register(
    "sparse_feed_forward(Tensor x, Tensor packed, Tensor? bias, str activation, Tensor then, "
    "Tensor? then_bias, Tensor? residual, int features, int? middle=None) -> Tensor",
    _sparse_feed_forward,
    fake=_fake_feed_forward,
    dense=_dense_feed_forward,
)
