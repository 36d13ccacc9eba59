"""N:M patterns, such as the 2:4 that sparse tensor cores run."""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchcram.operators.base import Sparsifier
from torchcram.selection import magnitude_keys
from torchcram.weights import reduction_last

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class NM(Sparsifier):
    """Keeps the `keep` largest of every `group` consecutive weights along the reduction dimension.

    The reduction dimension is the one a product sums over: the input features of a Linear layer,
    the input channels at each position of a kernel. A layer in which it is no multiple of `group`
    is left dense and named in a warning.
    """

    keep: int
    group: int

    def __post_init__(self) -> None:
        if not (isinstance(self.keep, int) and isinstance(self.group, int)):
            raise ValueError(
                f"NM: keep and group are integers, not {self.keep!r} and {self.group!r}"
            )
        if not 1 <= self.keep <= self.group:
            raise ValueError(f"NM: cannot keep {self.keep} of every {self.group}")

    @torch.no_grad()
    def select(self, scores: Weights) -> Masks:
        """Keeps the largest scores of every group; ties go to the earlier one."""
        masks, dense = {}, []
        for name, score in scores.items():
            view = reduction_last(scores, name)
            masks[name] = torch.ones_like(score, dtype=torch.bool)
            if view.shape[-1] % self.group:
                dense.append(name)
            else:
                reduction_last(scores, name, masks[name]).copy_(self._select(view))
        if dense:
            _warn_left_dense(self, tuple(dense))
        return masks

    def _select(self, scores: Tensor) -> Tensor:
        key = magnitude_keys(scores).unflatten(-1, (-1, self.group))  # (..., groups, group)
        place = torch.arange(self.group, device=key.device)
        beaten_by = torch.zeros_like(key, dtype=torch.uint8 if self.group < 256 else torch.int32)
        for rival in range(self.group):
            other = key[..., rival : rival + 1]
            beaten_by += torch.where(place > rival, other >= key, other > key)
        return (beaten_by < self.keep).flatten(-2)

    def __str__(self) -> str:
        return f"nm:{self.keep}:{self.group}"


@functools.cache
def _warn_left_dense(operator: NM, names: tuple[str, ...]) -> None:
    warnings.warn(
        f"{operator} leaves dense, their input dimension being no multiple of {operator.group}: "
        + ", ".join(names),
        stacklevel=4,
    )
