"""Sparse products as operators of torch, so that torch.compile and torch.export keep them.

Here are those of Linear layers; `torch.ops.torchcram` has them. The modules in
`torchcram.runtime.cpu.modules` call them.

The kernels have no derivatives. Where one is asked for, by `backward`, by forward mode or by a
transform of `torch.func`, an operator computes with the dense weight, which it unpacks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.packing import check_packed, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")

_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset

operators = torch.library.Library("torchcram", "FRAGMENT")
operators.define(
    "sparse_linear(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, int features, "
    "str activation) -> Tensor"
)
operators.define(
    "sparse_feed_forward(Tensor x, Tensor packed, Tensor? bias, str activation, Tensor then, "
    "Tensor? then_bias, Tensor? residual, int features, int? middle=None) -> Tensor"
)


def register(
    name: str,
    kernel: Callable[..., Tensor],
    *,
    shape: Callable[..., Tensor],
    dense: Callable[..., Tensor],
) -> None:
    """Registers the implementations of an operator that has been defined.

    Args:
        name: Name of the operator.
        kernel: Computes it on the CPU.
        shape: Returns an empty output, for tensors without data.
        dense: Computes the same with operators of torch that have derivatives, or raises an error
            that says why there is none.
    """
    operators.impl(name, kernel, "CPU")
    torch.library.register_fake(f"torchcram::{name}", shape, lib=operators)
    overload = getattr(torch.ops.torchcram, name).default

    def differentiable(keys: torch._C.DispatchKeySet, *arguments: object) -> Tensor:
        if _differentiated(arguments):
            return dense(*arguments)
        if (keys & _BELOW_AUTOGRAD).highestPriorityTypeId() == torch._C.DispatchKey.CPU:
            return kernel(*arguments)  # what the dispatcher would call, which takes longer
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = overload(*arguments)
        return y

    operators.impl(name, differentiable, "Autograd", with_keyset=True)


def _differentiated(arguments: tuple[object, ...]) -> bool:
    """Returns whether a derivative with respect to one of the arguments may be asked for."""
    forward_mode = forward_ad._current_level >= 0
    if not forward_mode and not torch.is_grad_enabled():
        return False
    return any(
        each.requires_grad or (forward_mode and forward_ad.unpack_dual(each).tangent is not None)
        for each in arguments
        if isinstance(each, Tensor)
    )


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

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_linear(  # type: ignore[no-any-return]
            *(x, tokens, inner, rows, packed.data_ptr(), packed.numel(), pointer(bias), more),
            *(number, y, torch.get_num_threads()),
        )

    return on_tokens(run, (packed,), x, residual, features=features, rows=rows)


def _sparse_linear_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    _activation: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], features))


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
    return y if residual is None else y + as_large_as(y, residual)


def unpack_linear(packed: Tensor, inputs: int, features: int) -> Tensor:
    """Returns the dense weight (features, inputs) of a packed matrix.

    Args:
        packed: Packed matrix of a Linear layer.
        inputs: Number of its columns.
        features: Number of its rows.

    Raises:
        ValueError: if the packed matrix has another number of rows or columns.
    """
    columns: Tensor = torch.ops.torchcram.sparse_linear(
        torch.eye(inputs, device=packed.device), packed, None, None, features, "none"
    )
    return columns.t().contiguous()


def _activate(x: Tensor, activation: str) -> Tensor:
    activation_number(activation)  # refuses one that there is no kernel for
    if activation.startswith("gelu"):
        return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
    if activation == "silu":
        return functional.silu(x)
    return functional.relu(x) if activation == "relu" else x


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

    def run(x: int, tokens: int, inner: int, more: int | None, y: int) -> int:
        return kernels().torchcram_feed_forward(  # type: ignore[no-any-return]
            *(x, tokens, inner, first_rows, rows, packed.data_ptr(), packed.numel()),
            *(pointer(bias), number, then.data_ptr(), then.numel(), pointer(then_bias)),
            *(more, y, torch.get_num_threads()),
        )

    return on_tokens(run, (packed, then), x, residual, features=features, rows=rows)


def _sparse_feed_forward_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _activation: str,
    _then: Tensor,
    _then_bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    _middle: int | None = None,
) -> Tensor:
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
    if middle is None:  # a trace, which has no data, is told
        middle = rows_of(packed)
    h = _dense_linear(x, packed, bias, None, middle, activation)
    return _dense_linear(h, then, then_bias, residual, features, "none")


def on_tokens(
    run: Callable[[int, int, int, int | None, int], int],
    matrices: tuple[Tensor, ...],
    x: Tensor,
    residual: Tensor | None,
    *,
    features: int,
    rows: int,
) -> Tensor:
    """Runs a kernel that maps the last dimension of `x` to so many features.

    Args:
        run: Kernel, given where the tokens are, how many, of how many features, where the residual
            is, and where the outputs go; returns 0 where the packed matrix is not one for that.
        matrices: Packed matrices that it uses.
        x: Inputs of any number of dimensions.
        residual: Tensor that is added to the outputs.
        features: Number of features of the outputs.
        rows: Number of rows of the last matrix.

    Raises:
        ValueError: if the packed matrix, the inputs and the residual do not fit together.
    """
    _require_tokens(x)
    x = x.contiguous()
    inner = x.shape[-1]
    y = x.new_empty((*x.shape[:-1], features))
    residual = None if residual is None else as_large_as(y, residual).contiguous()
    tokens = math.prod(x.shape[:-1])
    fits = rows == features
    if not fits or not run(x.data_ptr(), tokens, inner, pointer(residual), y.data_ptr()):
        for packed in matrices:  # changed, and torch was not told
            check_packed(packed)
        raise ValueError(
            f"the packed matrix does not map {inner} features to {features}, or there is no kernel "
            "for it here"
        )
    return y


def _require_tokens(x: Tensor) -> None:
    require_floats(x)
    if x.dim() == 0:
        raise ValueError("x is a single number: it takes at least one dimension")


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
        name: Name of the tensor.
        tensor: one dimension, contiguous.
        rows: Number of rows of the packed matrix.
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


register("sparse_linear", _sparse_linear, shape=_sparse_linear_shape, dense=_dense_linear)
register(
    "sparse_feed_forward",
    _sparse_feed_forward,
    shape=_sparse_feed_forward_shape,
    dense=_dense_feed_forward,
)
