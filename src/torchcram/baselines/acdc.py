"""Alternating compressed and decompressed training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcram.baselines.held_mask import HeldMask
from torchcram.layers import local_weights

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.baselines.schedule import Steps
    from torchcram.operators import Operator
    from torchcram.weights import Weights


class ACDC(HeldMask):
    """Phases in which M = C(w) is held alternate with phases in which all weights train.

        compressed phase    w <- M * w once, then w <- w - lr M * g
        dense phase         w <- w - lr g

    Peste et al., "AC/DC: alternating compressed/decompressed training", NeurIPS 2021. It begins
    with a dense phase and ends with a compressed one. Momentum and moments start from zero in every
    later dense phase, as in the released code of the paper.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        warmup: Number of steps of the first dense phase.
        period: Number of steps of every later phase.
        end: Step from which on the weights are compressed, until the end of the training. If it
            lies in a compressed phase, that phase is the last one.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If the phases do not fit before `end`.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        warmup: Steps,
        period: Steps,
        end: Steps,
        weights: Weights | None = None,
    ) -> None:
        if warmup < 0 or period < 1:
            raise ValueError(
                f"warmup must be at least 0 and period at least 1, got {warmup} and {period}"
            )
        if end < warmup:
            raise ValueError(f"end must be at least warmup, which is {warmup}, got {end}")
        super().__init__(model, base, operator, weights=weights)
        self.warmup, self.period, self.end = warmup, period, end

    def check_length(self, steps: int) -> None:
        """Raises ValueError if the training would end before the last compressed phase."""
        if self.end >= steps:
            raise ValueError(
                f"the last compressed phase begins at step {self.end}, and the training has only "
                f"{steps} steps: the end must be at most {steps - 1}"
            )

    def is_compressed(self, step: int) -> bool:
        """Whether a step, counted from 0, is in a compressed phase."""
        if step >= self.end:
            return True
        return step >= self.warmup and (step - self.warmup) // self.period % 2 == 0

    def update_masks(self) -> None:
        """Begins a phase: selects M, or keeps all weights and resets the moments."""
        compressed = self.is_compressed(self.steps)
        before = self.steps > 0 and self.is_compressed(self.steps - 1)
        if compressed == before:
            return
        if compressed:
            self.set_masks(self.operator.select(local_weights(self.weights)))
            self.hold_()
        else:
            for mask in self.masks.values():
                mask.fill_(True)
            self.reset_base_()
