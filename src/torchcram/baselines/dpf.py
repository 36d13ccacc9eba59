"""Dynamic pruning with feedback."""

from __future__ import annotations

from torchcram.baselines.scheduled import Scheduled


class DPF(Scheduled):
    """w <- w - lr grad L(M * w): the gradient at the pruned weights moves all of them.

    M = Top-K(|w|) at the sparsity s(t), selected anew every few steps, also after the end of the
    schedule, so that a pruned weight can come back. Lin et al., "Dynamic model pruning with
    feedback", ICLR 2020.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        schedule: Schedule of the sparsity.
        weights: Weights to prune; by default all `compressible_weights(model)`.
    """

    moves = True

    def update_masks(self) -> None:
        """Selects M by the magnitudes of the dense weights, if the schedule says so."""
        if self.schedule.is_due(self.steps, after_end=True):
            self.set_masks(self.select())
