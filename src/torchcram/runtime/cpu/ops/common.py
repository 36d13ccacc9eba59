"""What the operators share: their registration and the checks of their arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from collections.abc import Callable

_BELOW_AUTOGRAD = torch._C._after_ADInplaceOrView_keyset

_library = torch.library.Library("torchcram", "FRAGMENT")


def register(
    schema: str,
    kernel: Callable[..., Tensor],
    *,
    fake: Callable[..., Tensor],
    dense: Callable[..., Tensor],
) -> None:
    """Defines an operator of `torch.ops.torchcram` and registers its implementations.

    All of them get the arguments by position, without those at the end that have their default.

    Args:
        schema: Name, arguments and result of the operator, as in `torch.library.define`.
        kernel: Function that computes the output on the CPU.
        fake: Function that returns an empty output of the same shape and strides. It is called with
            tensors without data, by torch.compile and torch.export.
        dense: Function that computes the output with differentiable operators of torch, or raises
            an error that explains why there is no derivative.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, kernel, "CPU")
    torch.library.register_fake(f"torchcram::{name}", fake, lib=_library)
    overload = getattr(torch.ops.torchcram, name).default

    def differentiable(keys: torch._C.DispatchKeySet, *arguments: object) -> Tensor:
        if _differentiated(arguments):
            return dense(*arguments)
        if (keys & _BELOW_AUTOGRAD).highestPriorityTypeId() == torch._C.DispatchKey.CPU:
            return kernel(*arguments)  # the dispatcher would call it too, but more slowly
        with torch._C._AutoDispatchBelowAutograd():
            y: Tensor = overload(*arguments)
        return y

    _library.impl(name, differentiable, "Autograd", with_keyset=True)


def register_vmap(name: str, function: Callable[..., tuple[Tensor, int]]) -> None:
    """Registers how `torch.func.vmap` runs an operator that takes lists of tensors.

    Operators without lists need no such function: vmap runs them once for each index.

    Args:
        name: Name of the operator.
        function: Function that `torch.library.register_vmap` describes.
    """
    torch.library.register_vmap(f"torchcram::{name}", function, lib=_library)


def _differentiated(arguments: tuple[object, ...]) -> bool:
    """Returns whether a derivative with respect to one of the arguments may be needed."""
    forward_mode = forward_ad._current_level >= 0
    if not forward_mode and not torch.is_grad_enabled():
        return False
    return any(
        each.requires_grad or (forward_mode and forward_ad.unpack_dual(each).tangent is not None)
        for argument in arguments
        for each in (argument if isinstance(argument, (list, tuple)) else (argument,))
        if isinstance(each, Tensor)
    )


def expand_residual(y: Tensor, residual: Tensor) -> Tensor:
    """Returns a residual expanded to the shape of the outputs `y`.

    Raises:
        ValueError: If it is not float32, or cannot be expanded to that shape.
    """
    require_floats(residual)
    try:
        return residual.expand(y.shape)
    except RuntimeError:
        given, allowed = tuple(residual.shape), tuple(y.shape)
        raise ValueError(
            f"residual is of shape {given}, which cannot be expanded to outputs of {allowed}"
        ) from None


def pointer(tensor: Tensor | None) -> int | None:
    """Returns the address of a tensor, or None for None."""
    return None if tensor is None else tensor.data_ptr()


def require_rows(
    name: str, tensor: Tensor | None, rows: int, *, dtype: torch.dtype = torch.float32
) -> None:
    """Checks that a tensor, unless it is None, holds one value for each row of a packed matrix.

    Args:
        name: Name of the tensor in the error message.
        tensor: Tensor to check.
        rows: Number of rows of the packed matrix.
        dtype: Required dtype.

    Raises:
        ValueError: If the shape or the dtype is wrong, or the tensor is not contiguous.
    """
    if tensor is None:
        return
    contiguous = tensor.is_contiguous()
    if tensor.dtype != dtype or tensor.shape != (rows,) or not contiguous:
        given = f"{tuple(tensor.shape)} and {tensor.dtype}"
        given += "" if contiguous else ", not contiguous"
        raise ValueError(f"{name} is of shape {given}: it must hold {rows} values of {dtype}")


def require_floats(x: Tensor) -> None:
    """Checks that a tensor is float32.

    Raises:
        ValueError: If it is not.
    """
    if x.dtype != torch.float32:
        raise ValueError(f"sparse kernels need float32, not {x.dtype}")
