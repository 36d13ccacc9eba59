"""What a step needs beside the algorithm: a backup of the weights, arithmetic on lists of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Backup:
    """Copies of parameters, in memory that is allocated once and used again at every step."""

    def __init__(self) -> None:
        self._copies: dict[Tensor, Tensor] = {}
        self._saved: list[Tensor] = []

    @torch.no_grad()
    def save(self, parameters: Sequence[Tensor]) -> None:
        """Copies `parameters`."""
        for parameter in parameters:
            copy = self._copies.get(parameter)
            if copy is None or not _alike(copy, parameter):
                self._copies[parameter] = torch.empty_like(parameter)
        saved = list(parameters)
        if saved:
            torch._foreach_copy_([self._copies[p] for p in saved], saved)
        self._saved = saved

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back, bit for bit, what was saved last."""
        if self._saved:
            torch._foreach_copy_(self._saved, [self._copies[p] for p in self._saved])
        self._saved = []


def _alike(a: Tensor, b: Tensor) -> bool:
    return (a.shape, a.dtype, a.device, a.stride()) == (b.shape, b.dtype, b.device, b.stride())


@torch.no_grad()
def add_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], scale: float | Tensor) -> None:
    """tensors += scale * others; a `scale` that is a tensor stays on its device."""
    if not tensors:
        return
    if isinstance(scale, float):
        torch._foreach_add_(list(tensors), list(others), alpha=scale)
        return
    for tensor, other in zip(tensors, others, strict=True):
        tensor.addcmul_(other, scale.to(other.device, other.dtype))
