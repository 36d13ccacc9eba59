"""Gradual magnitude pruning."""

from __future__ import annotations

from torchcram.baselines.held_mask import HeldMask
from torchcram.baselines.scheduled import Scheduled


class GradualMagnitude(HeldMask, Scheduled):
    """M = Top-K(|w|) at the sparsity s(t), every few steps; in between w <- M * (w - lr M * g).

    Zhu & Gupta, "To prune, or not to prune", 2017. Weights once pruned stay zero, and so do their
    momentum and moments.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        schedule: Schedule of the sparsity.
        weights: Weights to prune; by default all `compressible_weights(model)`.
    """

    def update_masks(self) -> None:
        """Prunes further, if the schedule says so; pruned weights have the smallest magnitude."""
        if self.schedule.is_due(self.steps):
            self.set_masks(self.select())
            self.hold_()
