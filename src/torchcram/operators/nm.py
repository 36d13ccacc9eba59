"""N:M patterns, such as 2:4 for sparse tensor cores."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from torchcram.layers import count_inputs, cut_inputs, local_weights, reduction_last
from torchcram.messages import list_names, warn_caller
from torchcram.operators.base import Sparsifier
from torchcram.selection import magnitude_keys
from torchcram.sharding import complete_blocks

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.sharding import Part
    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class NM(Sparsifier):
    """Keeps the `keep` largest of every `group` consecutive weights along the reduction dimension.

    The reduction dimension is the one that a product sums over: the input features of a Linear
    layer, the input channels at each position of a kernel. A layer in which it is not a multiple of
    `group` is left dense and named in a warning.

    Attributes:
        keep: Number of weights to keep in every group.
        group: Number of consecutive weights in a group.
    """

    supports_shards: ClassVar[bool] = True

    keep: int
    group: int

    def __post_init__(self) -> None:
        for number in (self.keep, self.group):
            if not isinstance(number, int) or isinstance(number, bool):
                raise ValueError(
                    f"NM: keep and group must be integers, got {self.keep!r} and {self.group!r}"
                )
        if not 1 <= self.keep <= self.group:
            raise ValueError(f"NM: cannot keep {self.keep} of every {self.group}")

    @torch.no_grad()
    def select(self, scores: Weights) -> Masks:
        """Keeps the largest scores of every group; of equal scores the earlier is kept."""
        scores = local_weights(scores)
        masks, dense = {}, []
        for name, score in scores.items():
            masks[name] = torch.ones_like(score, dtype=torch.bool)
            if count_inputs(scores, name) % self.group:
                dense.append(name)
            elif (part := cut_inputs(scores, name)) is not None:
                masks[name].copy_(self._select_rows(score, part))
            else:
                view = reduction_last(scores, name)
                reduction_last(scores, name, masks[name]).copy_(self._select(view))
        if dense:
            _warn_left_dense(self, tuple(dense))
        return masks

    def _select_rows(self, scores: Tensor, part: Part) -> Tensor:
        """Returns the mask of local rows that are inputs, with groups that span ranks."""
        rows, before = complete_blocks(scores, part, self.group)
        kept = self._select(rows.movedim(0, -1)).movedim(-1, 0)
        return kept[before : before + len(scores)]

    def _select(self, scores: Tensor) -> Tensor:
        """Returns the mask along the last dimension."""
        key = magnitude_keys(scores).unflatten(-1, (-1, self.group))  # (..., groups, group)
        index = torch.arange(self.group, device=key.device)
        beaten_by = torch.zeros_like(key, dtype=torch.uint8 if self.group < 256 else torch.int32)
        for rival in range(self.group):
            other = key[..., rival : rival + 1]
            beaten_by += torch.where(index > rival, other >= key, other > key)
        return (beaten_by < self.keep).flatten(-2)

    def __str__(self) -> str:
        return f"nm:{self.keep}:{self.group}"


@functools.cache
def _warn_left_dense(operator: NM, names: tuple[str, ...]) -> None:
    warn_caller(
        f"{operator} leaves dense the layers whose input dimension is no multiple of "
        f"{operator.group}: {list_names(names)}"
    )
