"""A penalty that adapts itself to the sparsity that a training is to reach."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchcram.baselines.scores import scalar_for
from torchcram.operators import NM

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.baselines.schedule import SparsitySchedule
    from torchcram.operators import Sparsifier
    from torchcram.weights import Weights

GAIN = 100.0
"""What an error of 1 adds to v over the whole schedule; three times as much overshoots."""

DAMPING = 10.0
"""What an error of 1 adds to v for the step in which it occurs."""

BOUND = 20.0
"""Bound of v, and of v + damping e: factors are at most 2.4e8."""


class AdaptivePenalty:
    """Factor of a penalty, by which the sparsity follows a schedule.

        e      = s(t) - s
        v     <- v + gain e
        factor = sinh(v + damping e)

    s is the sparsity that has been reached, s(t) the scheduled one, and v begins at 0. Far from 0
    the factor grows exponentially, so that it finds any magnitude; it is negative where too much
    has been pruned. Everything stays on the device, so that steps can be captured.

    Args:
        schedule: Schedule of the sparsity.
        target: Operator whose sparsity is the final one.
        weights: Weights to prune.
    """

    def __init__(self, schedule: SparsitySchedule, target: Sparsifier, weights: Weights) -> None:
        self.schedule, self.final = schedule, sparsity_of(target)
        self.v = scalar_for(weights)
        self._wanted = scalar_for(weights)
        self._gain = GAIN / max(schedule.end - schedule.begin, 1)

    def set_step_(self, step: int) -> None:
        """Writes s(t) of a step to the device."""
        self._wanted.fill_(self.schedule.sparsity(step, self.final))

    def follow_(self, reached: Tensor) -> Tensor:
        """Updates v by the sparsity that has been reached; returns the factor."""
        error = self._wanted - reached
        self.v.add_(error, alpha=self._gain).clamp_(-BOUND, BOUND)
        return torch.sinh((self.v + DAMPING * error).clamp_(-BOUND, BOUND))


def sparsity_of(target: Sparsifier) -> float:
    """Returns the sparsity of a target.

    Raises:
        ValueError: If the operator does not say it.
    """
    if isinstance(target, NM):
        return 1 - target.keep / target.group
    level = getattr(target, "level", None)
    if level is None:
        raise ValueError(
            f"the sparsity of {target} is not known in advance, so that no penalty can adapt to "
            "it; allowed are operators such as global:0.9 and nm:2:4"
        )
    return float(level)
