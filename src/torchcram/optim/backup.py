"""A copy of the weights while they are perturbed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor


class Backup:
    """Copies of parameters, in memory that is allocated once and used again at every step."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: (parameter, copy)
        self._saved: tuple[list[Tensor], list[Tensor]] = ([], [])

    @torch.no_grad()
    def save(self, parameters: Iterable[Tensor]) -> None:
        """Copies `parameters`."""
        saved = list(parameters)
        copies = [self._memory(parameter) for parameter in saved]
        if saved:
            torch._foreach_copy_(copies, saved)
        self._saved = (saved, copies)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back, bit for bit, what was saved last."""
        (saved, copies), self._saved = self._saved, ([], [])
        if saved:
            torch._foreach_copy_(saved, copies)

    def _memory(self, parameter: Tensor) -> Tensor:
        held = self._copies.get(id(parameter))
        if held is None or held[0] is not parameter or _kind(held[1]) != _kind(parameter):
            held = (parameter, torch.empty_like(parameter))
            self._copies[id(parameter)] = held
        return held[1]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.get_device(), tensor.shape
