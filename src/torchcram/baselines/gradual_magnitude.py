"""Gradual magnitude pruning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcram.baselines.base import Baseline
from torchcram.baselines.schedule import SparsitySchedule, at_sparsity
from torchcram.layers import local_weights
from torchcram.operators import Operator, Sparsifier
from torchcram.weights import apply_masks_, mask_gradients_

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.weights import Masks, Weights


class Scheduled(Baseline):
    """Base class of methods whose sparsity follows a schedule.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        schedule: Schedule of the sparsity.
        weights: Weights to prune; by default all `compressible_weights(model)`.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        schedule: SparsitySchedule,
        weights: Weights | None = None,
    ) -> None:
        super().__init__(model, base, operator, weights=weights)
        self.schedule = schedule

    @classmethod
    def check_operator(cls, operator: Operator) -> Sparsifier:
        """Returns the target if its sparsity can grow."""
        target = super().check_operator(operator)
        at_sparsity(target, 0.0)
        return target

    def check_length(self, steps: int) -> None:
        """Raises ValueError if the schedule ends after the training."""
        self.schedule.check_length(steps)

    def scores(self) -> Weights:
        """Returns the scores that masks are selected by: the weights, by their magnitude."""
        return local_weights(self.weights)

    def pattern(self) -> Sparsifier:
        """Returns the target at this step's sparsity."""
        sparsity = self.schedule.sparsity(self.steps, self.operator.level)  # type: ignore[attr-defined]
        return at_sparsity(self.operator, sparsity)

    def select(self) -> Masks:
        """Returns the masks of this step's sparsity."""
        return self.pattern().select(self.scores())

    def final_masks(self) -> Masks:
        """Returns the masks of the target by the same scores."""
        return self.operator.select(self.scores())


class GradualMagnitude(Scheduled):
    """M = Top-K(|w|) at the sparsity s(t), every few steps; in between w <- M * (w - lr M * g).

    Zhu & Gupta, "To prune, or not to prune", 2017. Weights once pruned stay zero, and so do their
    momentum and moments.
    """

    def update_masks(self) -> None:
        """Prunes further, if the schedule says so; pruned weights have the smallest magnitude."""
        if self.schedule.is_due(self.steps):
            self._set_masks(self.select())
            self.hold_()

    def combine_(self) -> None:
        """Masks the gradient: g~ = M * g."""
        mask_gradients_(self.weights, self.masks)

    def project_(self) -> None:
        """Keeps pruned weights at zero."""
        apply_masks_(self.weights, self.masks)
