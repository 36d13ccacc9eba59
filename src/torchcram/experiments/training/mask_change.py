"""How much the masks move during training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchcram import GlobalTopK, Sparsifier, parse_operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchcram import Masks, Weights

DEFAULT = GlobalTopK(0.9)


class MaskChange:
    """The fraction of the entries of a mask that are other than they were an epoch before.

    The mask is that of one fixed operator at w, whatever the steps used: the first one of
    `operators` that does nothing but prune, at one level, and else global:0.9. It is a measure of
    how settled the choice of weights is, comparable between runs with and without CrAM.

    Args:
        weights: that the operator sees.
        operators: those of the training, as text.
    """

    def __init__(self, weights: Weights, operators: Sequence[str]) -> None:
        read = [parse_operator(text) for text in operators]
        pruning = [one for one in read if isinstance(one, Sparsifier) and not one.is_range]
        self.operator: Sparsifier = pruning[0] if pruning else DEFAULT
        self._weights = weights
        self._masks = self._select()

    def update(self) -> float:
        """Returns the change since the last call, or since the beginning; takes new masks."""
        before, self._masks = self._masks, self._select()
        changed = [(before[name] != mask).sum() for name, mask in self._masks.items()]
        return int(torch.stack(changed).sum()) / sum(mask.numel() for mask in before.values())

    @torch.no_grad()
    def _select(self) -> Masks:
        return self.operator.select(self._weights)
