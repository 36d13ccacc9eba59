"""Pruning by an upper confidence bound of the importance (PLATON)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from torchcram.baselines.scheduled import Scheduled
from torchcram.baselines.scores import as_magnitudes, gradients_of, per_weight
from torchcram.layers import like
from torchcram.sharding import local
from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.baselines.schedule import SparsitySchedule
    from torchcram.operators import Operator
    from torchcram.weights import Masks, Weights


class PLATON(Scheduled):
    """w <- M * (w - lr g) with M = Top-K(I_avg * U_avg) at the sparsity s(t).

        I      = |w * g|                                     sensitivity
        I_avg <- beta1 I_avg + (1 - beta1) I
        U_avg <- beta2 U_avg + (1 - beta2) |I - I_avg|       uncertainty

    Zhang et al., "PLATON: pruning large transformer models with upper confidence bound of weight
    importance", ICML 2022. Averages begin at zero. The gradient is dense, so that a pruned weight
    whose score is still high enough comes back with its next step. M is selected anew every few
    steps, also after the end of the schedule, from the averages over the steps before, and applied
    after every step. The first step has no averages to select by, so that M = 1. The released code
    averages I over windows of ten steps before it updates I_avg; here every step does.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "global:0.9".
        schedule: Schedule of the sparsity.
        beta1: Decay of the average sensitivity.
        beta2: Decay of the average uncertainty.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If a decay is not in [0, 1).
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        schedule: SparsitySchedule,
        beta1: float = 0.85,
        beta2: float = 0.95,
        weights: Weights | None = None,
    ) -> None:
        for name, beta in (("beta1", beta1), ("beta2", beta2)):
            if not 0 <= beta < 1:
                raise ValueError(f"{name} must be in [0, 1), got {beta}")
        super().__init__(model, base, operator, schedule=schedule, weights=weights)
        self.beta1, self.beta2 = beta1, beta2
        self._sensitivity = per_weight(self.weights)
        self._uncertainty = per_weight(self.weights)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the averages of sensitivity and uncertainty."""
        return {"sensitivity": self._sensitivity, "uncertainty": self._uncertainty}

    def scores(self) -> Weights:
        """Returns the scores that masks are selected by: I_avg * U_avg."""
        products = {n: average * self._uncertainty[n] for n, average in self._sensitivity.items()}
        return like(self.weights, products)

    def update_masks(self) -> None:
        """Selects M by the averages so far, if the schedule says so; the step then prunes."""
        due = self.schedule.is_due(self.steps, after_end=True)
        if self.steps == 1:  # makes up for the first step
            due = due or self.schedule.is_due(0)
        if due and self.steps > 0:
            self.set_masks(self.select())

    def combine_(self) -> None:
        """Updates the averages; the gradient stays dense."""
        gradients = gradients_of(self.weights)
        if not gradients:
            return
        averages = [self._sensitivity[name] for name in gradients]
        weights = [local(self.weights[name]) for name in gradients]
        products = torch._foreach_mul(weights, list(gradients.values()))
        torch._foreach_abs_(products)
        sensitivities = [each.to(mean.dtype) for each, mean in zip(products, averages, strict=True)]
        torch._foreach_lerp_(averages, sensitivities, 1 - self.beta1)
        torch._foreach_sub_(sensitivities, averages)
        torch._foreach_abs_(sensitivities)  # |I - I_avg|
        uncertainties = [self._uncertainty[name] for name in gradients]
        torch._foreach_lerp_(uncertainties, sensitivities, 1 - self.beta2)

    def project_(self) -> None:
        """Prunes what the step has changed."""
        apply_masks_(self.weights, self.masks)

    def final_masks(self) -> Masks:
        """Returns the masks of the target by the same scores; pruned weights stay pruned."""
        scores = {n: score.masked_fill(~self.masks[n], -1) for n, score in self.scores().items()}
        return self.operator.select(as_magnitudes(self.weights, scores))
