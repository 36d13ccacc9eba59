"""Base classes of methods whose sparsity grows, and of those that have a schedule for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcram.baselines.base import Baseline
from torchcram.baselines.schedule import SparsitySchedule, at_sparsity
from torchcram.layers import local_weights
from torchcram.operators import Operator, Sparsifier

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.weights import Masks, Weights


class Growing(Baseline):
    """Base class of methods whose sparsity grows up to that of the target."""

    allowed_targets = "operators with a single sparsity, such as global:0.9 and uniform:0.9"

    @classmethod
    def check_operator(cls, operator: Operator) -> Sparsifier:
        """Returns the target if its sparsity can grow.

        Raises:
            ValueError: If it has no single sparsity, as N:M patterns and ranges.
        """
        target = super().check_operator(operator)
        at_sparsity(target, 0.0)
        return target

    @property
    def final_sparsity(self) -> float:
        """Sparsity s_f of the target."""
        level: float = self.operator.level  # type: ignore[attr-defined]
        return level


class Scheduled(Growing):
    """Base class of methods whose sparsity follows a schedule.

    A subclass calls `select` in `update_masks` at the steps that the schedule names, and overrides
    `scores` if it does not select by magnitude.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        schedule: Schedule of the sparsity.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If the schedule begins with more than the sparsity of the target.
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
        if schedule.initial > self.final_sparsity:
            raise ValueError(
                f"initial must be at most the sparsity of {self.operator}, got {schedule.initial}"
            )
        self.schedule = schedule

    def check_length(self, steps: int) -> None:
        """Raises ValueError if the schedule ends after the training."""
        self.schedule.check_length(steps)

    def scores(self) -> Weights:
        """Returns the scores that masks are selected by: the weights, by their magnitude."""
        return local_weights(self.weights)

    def pattern(self) -> Sparsifier:
        """Returns the target at the sparsity s(t) of this step."""
        sparsity = self.schedule.sparsity(self.steps, self.final_sparsity)
        return at_sparsity(self.operator, sparsity)

    def select(self) -> Masks:
        """Returns the masks of the sparsity s(t) of this step."""
        return self.pattern().select(self.scores())

    def final_masks(self) -> Masks:
        """Returns the masks of the target by the same scores."""
        return self.operator.select(self.scores())
