"""Gradients taken out of `.grad`, combined, and put back.

They travel as lists of (parameter, gradient): a step handles hundreds of them, and looking tensors
up in dictionaries would cost more than the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from torchcram.optim.shard_context import ShardContext

Gradients = list[tuple["Tensor", "Tensor"]]


def gradients_of(parameters: Iterable[Tensor]) -> Gradients:
    """Returns the gradients that are there."""
    return [(p, grad) for p in parameters if (grad := p.grad) is not None]


def take_gradients(groups: Iterable[dict[str, Any]]) -> list[Gradients]:
    """Takes the gradients of every parameter group out of `.grad`, which is None afterwards."""
    taken = [gradients_of(group["params"]) for group in groups]
    if not any(taken):
        raise RuntimeError("there is no gradient at w: run backward before the compressed pass")
    for group in taken:
        for parameter, gradient in group:
            if gradient.is_sparse:
                shape = tuple(parameter.shape)
                raise ValueError(f"the gradient of a parameter of shape {shape} is a sparse tensor")
    # copies of views into a buffer that the next backward writes to, as DDP has them
    taken = [[(p, g.clone() if g._is_view() else g) for p, g in group] for group in taken]
    for group in taken:
        for parameter, _ in group:
            parameter.grad = None
    return taken


def put_gradients(gradients: Gradients) -> None:
    """Puts gradients into `.grad`."""
    for parameter, gradient in gradients:
        parameter.grad = gradient


def add_gradients(gradients: Gradients, shard_context: ShardContext) -> None:
    """Adds gradients to what `.grad` holds."""
    ours, theirs = [], []
    for parameter, gradient in gradients:
        second = parameter.grad
        if second is None:
            parameter.grad = gradient
        else:
            ours.append(second)
            theirs.append(gradient)
    ours, theirs = shard_context.here(ours), shard_context.here(theirs)
    pointers = [gradient.data_ptr() for gradient in theirs]
    for second, pointer in zip(ours, pointers, strict=True):
        if second.data_ptr() == pointer and pointer:
            shape = tuple(second.shape)
            raise RuntimeError(
                f"the second gradient of a parameter of shape {shape} was written over the first: "
                "let backward allocate it (zero_grad) instead of using a buffer again"
            )
    add_scaled_(ours, theirs, 1.0)


@torch.no_grad()
def add_scaled_(tensors: list[Tensor], others: list[Tensor], scale: float | Tensor) -> None:
    """Adds scale * others to `tensors`; a `scale` that is a tensor stays on its device."""
    if not tensors:
        return
    if isinstance(scale, float):
        torch._foreach_add_(tensors, others, alpha=scale)
        return
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, other in zip(tensors, others, strict=True):
        ours, theirs = by_device.setdefault(other.device, ([], []))
        ours.append(tensor)
        theirs.append(other)
    for device, (ours, theirs) in by_device.items():
        torch._foreach_add_(ours, torch._foreach_mul(theirs, scale.to(device)))


def norm(tensors: list[Tensor], order: float) -> Tensor:
    """Returns the norm of all `tensors` together, on the device of the first."""
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if not tensors:
        return torch.zeros(())
    half = any(tensor.dtype in (torch.float16, torch.bfloat16) for tensor in tensors)
    each = list(torch._foreach_norm(tensors, order, dtype=torch.float32 if half else None))
    if len({one.device for one in each}) > 1:
        each = [one.to(each[0].device) for one in each]
    together: Tensor = torch.linalg.vector_norm(torch.stack(each), order)
    return together


def one_over(length: Tensor) -> Tensor:
    """Returns 1 / length, and 0 for a gradient of length 0."""
    return torch.where(length == 0, 0, 1 / length)


def clipping(length: Tensor, most: float) -> Tensor:
    """Returns what `clip_grad_norm_` multiplies a gradient by that is longer than `most`."""
    return (most / (length + 1e-6)).clamp(max=1)
