"""Lottery tickets: iterative magnitude pruning with rewinding."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from torchcram.baselines.held_mask import HeldMask
from torchcram.baselines.schedule import Steps, at_sparsity
from torchcram.baselines.scheduled import Growing
from torchcram.layers import local_weights
from torchcram.sharding import local
from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.operators import Operator
    from torchcram.weights import Masks, Weights

MOST_DROPPED = 0.2
"""Share of the remaining weights that a round of the paper drops."""


class LotteryTickets(HeldMask, Growing):
    """Trains in rounds; each begins at the weights of an early step, with fewer of them.

    ::

        round 0               train from step 0 to E; keep a copy w_k of the weights at step k
        round r = 1 ... R-1   M = Top-K(|w|) at the sparsity 1 - (1 - s)^(r / (R - 1)),
                              w <- M * w_k, then train M * w from step k to E

    R is `rounds`, E is `round_steps`, k is `rewind_step`, s the sparsity of `operator`, at which
    the last round trains. Frankle et al., "Linear mode connectivity and the lottery ticket
    hypothesis", ICML 2020. A rewind restores all parameters and all buffers, such as the statistics
    of batch norm, and resets the state of the base optimizer.

    The learning rate has to begin again, too. `position` gives the step within the round, for a
    scheduler that calls `decay`, the schedule of one round::

        optimizer = LotteryTickets(model, base, "global:0.9", round_steps=9000, rewind_step=500)
        scheduler = LambdaLR(optimizer, lambda step: decay(optimizer.position(step)))
        for step, batch in zip(range(optimizer.total_steps), batches):
            optimizer.step(closure)
            scheduler.step()

    The first step of a round changes the weights before the gradient is computed, so every step
    needs a closure, or a pass inside `compressed()`.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        round_steps: Number E of steps of a whole training.
        rewind_step: Step k at which rounds begin, except the first.
        rounds: Number R of rounds, the first dense one included; by default the smallest number in
            which no round drops more than 20 % of the remaining weights, as in the paper.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If an argument is not allowed.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        round_steps: Steps,
        rewind_step: Steps,
        rounds: int | None = None,
        weights: Weights | None = None,
    ) -> None:
        if round_steps < 1:
            raise ValueError(f"round_steps must be at least 1, got {round_steps}")
        if not 0 <= rewind_step < round_steps:
            raise ValueError(
                f"rewind_step must be in [0, {round_steps}), below round_steps, got {rewind_step}"
            )
        if rounds is not None and rounds < 2:
            raise ValueError(f"rounds must be at least 2, the first of them dense, got {rounds}")
        super().__init__(model, base, operator, weights=weights)
        self.round_steps, self.rewind_step = round_steps, rewind_step
        self.rounds = count_rounds(self.final_sparsity) if rounds is None else rounds
        self._rewind = {name: value.clone() for name, value in self._values().items()}  # w_k

    @property
    def total_steps(self) -> int:
        """Number of steps of all rounds: k + R (E - k)."""
        return self.rewind_step + self.rounds * (self.round_steps - self.rewind_step)

    @property
    def round_index(self) -> int:
        """Round of the next step, counted from 0."""
        return self.round_at(self.steps)

    @property
    def round_position(self) -> int:
        """Position of the next step within its round: see `position`."""
        return self.position(self.steps)

    def round_at(self, step: int) -> int:
        """Returns the round of a step; both count from 0. The last round does not end."""
        later = (step - self.rewind_step) // (self.round_steps - self.rewind_step)
        return min(max(later, 0), self.rounds - 1)

    def position(self, step: int) -> int:
        """Returns the position of a step within its round, between `rewind_step` and `round_steps`.

        The first round begins at 0. After the end, the position exceeds `round_steps`.
        """
        return step - self.round_at(step) * (self.round_steps - self.rewind_step)

    def lr_position(self, step: int, steps: int) -> tuple[int, int]:  # noqa: ARG002
        """Returns the position of a step within its round, and the length of a round."""
        return self.position(step), self.round_steps

    def check_length(self, steps: int) -> None:
        """Raises ValueError unless all rounds together make up the training."""
        if self.total_steps != steps:
            raise ValueError(
                f"{self.rounds} rounds of {self.round_steps} steps that begin at step "
                f"{self.rewind_step} make {self.total_steps} steps, and the training has {steps}"
            )

    def sparsity_of(self, index: int) -> float:
        """Returns the sparsity of a round, counted from 0."""
        if index == self.rounds - 1:
            return self.final_sparsity
        kept: float = (1 - self.final_sparsity) ** (index / (self.rounds - 1))
        return 1 - kept

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Takes one step; returns the loss: see `Baseline.step`.

        Raises:
            RuntimeError: If there is neither a closure nor a pass inside `compressed()`.
        """
        if closure is None and not self._ready:
            raise RuntimeError(
                "step() may rewind the weights, and .grad belongs to those from before. Either "
                "pass a closure, optimizer.step(closure), or run the forward and backward pass in "
                "`with optimizer.compressed():` before optimizer.step()"
            )
        return super().step(closure)

    def update_masks(self) -> None:
        """Keeps a copy of w at the step k; selects M and rewinds where a round begins."""
        if self.steps == self.rewind_step:
            for name, value in self._values().items():
                self._rewind[name].copy_(value)
        elif self.position(self.steps) == self.rewind_step:
            level = at_sparsity(self.operator, self.sparsity_of(self.round_index))
            self.set_masks(level.select(local_weights(self.weights)))
            for name, value in self._values().items():
                value.copy_(self._rewind[name])
            apply_masks_(self.weights, self.masks)
            self.reset_base_()

    def final_masks(self) -> Masks:
        """Returns the masks of the last round; before it has begun, new ones by magnitude."""
        last = self.total_steps - (self.round_steps - self.rewind_step)  # step it begins with
        begun = self.steps > last or (self.steps == last and self._begun)
        return self.masks if begun else super().final_masks()

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the copy of parameters and buffers that rounds begin with."""
        return {"rewind": self._rewind}

    def _values(self) -> dict[str, Tensor]:
        """Returns all parameters and buffers by name; of sharded ones the rows on this rank."""
        named = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: local(value.detach()) for name, value in named.items()}


def count_rounds(sparsity: float) -> int:
    """Returns the number of rounds, the dense one included, of which none drops more than 20 %."""
    if not sparsity:
        return 2
    return 1 + math.ceil(math.log(1 - sparsity) / math.log(1 - MOST_DROPPED) - 1e-9)
