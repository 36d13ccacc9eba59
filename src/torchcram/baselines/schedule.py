"""Schedule of the sparsity during a training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from torchcram.operators import Sparsifier

Steps = Annotated[int, "steps"]
"""Number of steps; a recipe may give it as a number of epochs or a part of the training."""


@dataclass(frozen=True)
class SparsitySchedule:
    """s(t) = s_f + (s_0 - s_f) (1 - (t - begin) / (end - begin))^3, from Zhu & Gupta, 2017.

    Attributes:
        end: Step from which on the sparsity is the final one, s_f.
        begin: Step at which pruning begins; before it, all weights are kept.
        interval: Number of steps between two selections of the mask.
        initial: Sparsity s_0 at the step `begin`.
    """

    end: Steps
    begin: Steps = 0
    interval: Steps = 100
    initial: float = 0.0

    def __post_init__(self) -> None:
        if self.begin < 0:
            raise ValueError(f"begin must be at least 0, got {self.begin}")
        if self.end < self.begin:
            raise ValueError(f"end must be at least begin, which is {self.begin}, got {self.end}")
        if self.interval < 1:
            raise ValueError(f"interval must be at least 1, got {self.interval}")
        if not 0 <= self.initial < 1:
            raise ValueError(f"initial must be in [0, 1), got {self.initial}")

    def sparsity(self, step: int, final: float) -> float:
        """Returns the sparsity at a step, counted from 0."""
        if step < self.begin:
            return 0.0
        if step >= self.end:
            return final
        left = 1 - (step - self.begin) / (self.end - self.begin)
        return final + (self.initial - final) * left**3

    def is_due(self, step: int, *, after_end: bool = False) -> bool:
        """Whether the mask is selected at a step: every `interval` steps, and at the end.

        Args:
            step: Number of the step, counted from 0.
            after_end: Whether selections go on every `interval` steps after the end.
        """
        if step > self.end:
            return after_end and (step - self.end) % self.interval == 0
        if step < self.begin:
            return False
        return step == self.end or (step - self.begin) % self.interval == 0

    def next_due(self, step: int) -> int | None:
        """Returns the first step after `step` at which the mask is selected; None if none is."""
        if step >= self.end:
            return None
        passed = (step - self.begin) // self.interval + 1 if step >= self.begin else 0
        return min(self.begin + passed * self.interval, self.end)

    def check_length(self, steps: int) -> None:
        """Raises ValueError if a training of `steps` steps ends before the schedule does."""
        if self.end >= steps:
            raise ValueError(
                f"the schedule ends at step {self.end}, and the training has only {steps} steps: "
                f"the end must be at most {steps - 1}"
            )


def at_sparsity(operator: Sparsifier, sparsity: float) -> Sparsifier:
    """Returns an operator of the same kind with another sparsity.

    Raises:
        ValueError: If the operator has no single sparsity, as N:M patterns and ranges.
    """
    if not hasattr(operator, "level") or operator.is_range:
        raise ValueError(
            f"{operator} has no single sparsity that could grow by a schedule; allowed are "
            "operators such as global:0.9 and uniform:0.9"
        )
    return replace(operator, sparsity=sparsity)  # type: ignore[type-var]
