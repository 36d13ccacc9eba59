"""Gradual second-order pruning, as WoodFisher and oBERT prune."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchcram.baselines.base import STATE
from torchcram.baselines.gradual_magnitude import GradualMagnitude
from torchcram.pruners.obs import Fisher, Obs, drop_

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.baselines.schedule import SparsitySchedule
    from torchcram.operators import Operator
    from torchcram.weights import Weights


class GradualObs(GradualMagnitude):
    """Prunes to the sparsity s(t) every few steps, by second-order scores, and corrects w.

    ::

        F  = lambda I + 1/m sum_k g_k g_k^T           in blocks, of the last m gradients
        M  = Top-K(w_i^2 / (2 [F^-1]_ii))             at the sparsity s(t)
        w <- w - F^-1[:,Q] (F^-1[Q,Q])^-1 w_Q         once, for the dropped weights Q
        w <- M * (w - lr M * g)                       in between

    Singh & Alistarh, "WoodFisher: efficient second-order approximation for neural network
    compression", NeurIPS 2020; Kurtic et al., "The optimal BERT surgeon", EMNLP 2022. Scores and
    correction are those of the pruner `Obs`.

    The gradients g_k are those of the m steps before a pruning step, so that they cost no pass of
    their own; w moves a little while they are collected. If the last pruning step was fewer than m
    steps ago, all gradients since then are used: earlier ones belong to other weights. F takes
    4 block bytes per weight, only while it is collected; a checkpoint from that time contains it,
    so that resuming is exact.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        schedule: Schedule of the sparsity.
        gradients: Number m of gradients, each of one step.
        block: Number B of consecutive weights whose interaction is considered.
        damping: Damping lambda.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If an argument is not allowed, the schedule prunes at step 0, when there is no
            gradient yet, or weights are sharded.
    """

    capturable_steps = False

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        schedule: SparsitySchedule,
        gradients: int = 1024,
        block: int = 50,
        damping: float = 1e-7,
        weights: Weights | None = None,
    ) -> None:
        super().__init__(model, base, operator, schedule=schedule, weights=weights)
        self.require_whole()
        self.obs = Obs(
            self.operator, gradients=gradients, block=block, damping=damping, recomputations=1
        )
        if self._prunes_at(0):
            raise ValueError(
                "the schedule prunes at step 0, before there is any gradient: begin must be at "
                f"least 1, or initial 0, got {schedule}"
            )
        self._fisher: Fisher | None = None  # F, while it is collected

    def update_masks(self) -> None:
        """Prunes further and corrects w, if the schedule says so; then F is freed."""
        if not self._prunes_at(self.steps):
            return
        if self._fisher is None:
            raise RuntimeError(f"no gradient was collected before the pruning step {self.steps}")
        self._fisher.finish()
        self.set_masks(drop_(self.weights, self._fisher, self.pattern()))
        self._fisher = None
        self.hold_()

    def combine_(self) -> None:
        """Masks the gradient, g~ = M * g, and adds it to F before a pruning step."""
        super().combine_()
        due = self.schedule.next_due(self.steps)
        if due is None or self.steps < due - self.obs.gradients or not self._prunes_at(due):
            return
        if self._fisher is None:
            self._fisher = self._new_fisher()
        self._fisher.add({n: w.grad for n, w in self.weights.items() if w.grad is not None})

    def _prunes_at(self, step: int) -> bool:
        """Whether a step drops weights; the first one of a schedule that begins at 0 does not."""
        if not self.schedule.is_due(step):
            return False
        return self.schedule.sparsity(step, self.final_sparsity) > 0

    def _new_fisher(self) -> Fisher:
        # every gradient is added at once: no memory for gradients that wait
        return Fisher(self.weights, block=self.obs.block, damping=self.obs.damping, chunk=1)

    def _extra_state(self) -> dict[str, Any]:
        extra = super()._extra_state()
        extra[STATE]["fisher"] = None if self._fisher is None else self._fisher.state_dict()
        return extra

    def _read_extra_state(self, state: dict[str, Any]) -> Callable[[], None]:
        load_others = super()._read_extra_state(state)
        if STATE not in state:
            return load_others
        fisher, saved = None, state[STATE]["fisher"]
        if saved is not None:
            fisher = self._new_fisher()
            fisher.load_state_dict(saved)

        def load() -> None:
            load_others()
            self._fisher = fisher

        return load
