"""Dynamic pruning with feedback."""

from __future__ import annotations

from torchcram.baselines.gradual_magnitude import Scheduled
from torchcram.weights import apply_masks_


class DPF(Scheduled):
    """w <- w - lr grad L(M * w): the gradient at the pruned weights moves all of them.

    M = Top-K(|w|) at the sparsity s(t), selected anew every few steps, also after the end of the
    schedule, so that a pruned weight can come back. Lin et al., "Dynamic model pruning with
    feedback", ICLR 2020.
    """

    moves = True

    def update_masks(self) -> None:
        """Selects M by the magnitudes of the dense weights."""
        if self.schedule.is_due(self.steps, after_end=True):
            self._set_masks(self.select())

    def move_(self) -> None:
        """Moves to w~ = M * w."""
        apply_masks_(self.weights, self.masks)
