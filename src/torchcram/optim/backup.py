"""A copy of the weights while they are perturbed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from torchcram.optim.spread import Spread


class Backup:
    """Copies of parameters, in memory that is allocated once and used again at every step."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: (parameter, copy)
        self._saved: tuple[list[Tensor], list[Tensor]] = ([], [])

    @torch.no_grad()
    def save(self, parameters: Iterable[Tensor]) -> None:
        """Copies `parameters`."""
        saved = list(parameters)
        here = self._spread.here(saved)
        copies = [self._memory(*pair) for pair in zip(saved, here, strict=True)]
        if saved:
            torch._foreach_copy_(copies, here)
        self._saved = (saved, copies)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts back, bit for bit, what was saved last."""
        (saved, copies), self._saved = self._saved, ([], [])
        if saved:
            torch._foreach_copy_(self._spread.here(saved), copies)

    def _memory(self, parameter: Tensor, here: Tensor) -> Tensor:
        held = self._copies.get(id(parameter))
        if held is None or held[0] is not parameter or _kind(held[1]) != _kind(here):
            held = (parameter, torch.empty_like(here))
            self._copies[id(parameter)] = held
        return held[1]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.get_device(), tensor.shape
