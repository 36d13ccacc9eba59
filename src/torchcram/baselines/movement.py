"""Movement pruning, by a schedule of the sparsity or by a penalty on the scores."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from torchcram.baselines.scheduled import Scheduled
from torchcram.baselines.scores import (
    as_magnitudes,
    gradients_of,
    per_weight,
    scalar_for,
    sigmoid_slopes,
)
from torchcram.sharding import local
from torchcram.weights import mask_gradients_

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.baselines.schedule import SparsitySchedule
    from torchcram.operators import Operator
    from torchcram.weights import Weights


class Movement(Scheduled):
    """w~ = M * w with M = Top-K(S) at the sparsity s(t), and scores S that are trained as well.

        grad w = M * grad L(w~)
        grad S = w * grad L(w~)

    Sanh, Wolf & Rush, "Movement pruning: adaptive sparsity by fine-tuning", NeurIPS 2020. The
    gradient of S passes straight through Top-K: S grows where steps move a weight away from zero,
    and also where it is pruned, so that it can come back. Scores begin at zero. M is selected anew
    every few steps, also after the end of the schedule; the paper does so at every step.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps, also those of the scores.
        operator: Target, such as "global:0.9".
        schedule: Schedule of the sparsity.
        score_lr: Learning rate of the scores; they have no weight decay.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If `score_lr` is negative.
    """

    moves = True

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        schedule: SparsitySchedule,
        score_lr: float = 1e-2,
        weights: Weights | None = None,
    ) -> None:
        if not score_lr >= 0:
            raise ValueError(f"score_lr must be at least 0, got {score_lr}")
        super().__init__(model, base, operator, schedule=schedule, weights=weights)
        self._scores = per_weight(self.weights)
        self.train_also("scores", self._scores, lr=score_lr, weight_decay=0.0)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the scores S."""
        return {"scores": self._scores}

    def scores(self) -> Weights:
        """Returns the scores that masks are selected by: S, in a form that is positive."""
        return as_magnitudes(self.weights, self._scores)

    def update_masks(self) -> None:
        """Selects M = Top-K(S), if the schedule says so."""
        if self.schedule.is_due(self.steps, after_end=True):
            self.set_masks(self.select())

    def combine_(self) -> None:
        """Derives the gradients of w and of S from the gradient at w~."""
        gradients = gradients_of(self.weights)
        for score in self._scores.values():
            score.grad = None
        if gradients:
            weights = [local(self.weights[name]) for name in gradients]
            products = torch._foreach_mul(list(gradients.values()), weights)
            for name, product in zip(gradients, products, strict=True):
                self._scores[name].grad = product.to(self._scores[name].dtype)
        mask_gradients_(self.weights, self.masks)


class SoftMovement(Movement):
    """Movement pruning with M = sigmoid(S) > threshold and a penalty on the scores.

        loss = L(w~) + penalty mean(sigmoid(S))

    Threshold and penalty grow from zero to their final values as the sparsity of `Movement` does.
    What they prune is not known in advance: a larger penalty prunes more. At the end the Top-K of S
    remain, exactly as many as the target says. The mean is over all weights. Sanh et al., NeurIPS
    2020.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps, also those of the scores.
        operator: Target, such as "global:0.9".
        schedule: Schedule by which threshold and penalty grow; its interval has no effect.
        penalty: Final factor of the penalty; the paper chooses it for a sparsity, up to hundreds.
        threshold: Final threshold of sigmoid(S).
        score_lr: Learning rate of the scores; they have no weight decay.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If an argument is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        schedule: SparsitySchedule,
        penalty: float = 400.0,
        threshold: float = 0.1,
        score_lr: float = 1e-2,
        weights: Weights | None = None,
    ) -> None:
        if not penalty >= 0:
            raise ValueError(f"penalty must be at least 0, got {penalty}")
        if not 0 < threshold < 1:
            raise ValueError(f"threshold must be in (0, 1), got {threshold}")
        super().__init__(
            model, base, operator, schedule=schedule, score_lr=score_lr, weights=weights
        )
        self.penalty, self.threshold = penalty, threshold
        # factor of the gradient of the penalty
        self._pull = scalar_for(self._scores)

    @property
    def growth(self) -> float:
        """Share of the final threshold and penalty that this step has."""
        return self.schedule.sparsity(self.steps, 1.0)

    def update_masks(self) -> None:
        """Marks what the threshold keeps: M = sigmoid(S) > threshold."""
        threshold = _logit(self.threshold * self.growth)  # of S itself
        for name, score in self._scores.items():
            torch.gt(score, threshold, out=self.masks[name])

    def set_step_numbers_(self) -> None:
        """Sets the factor of the gradient of the penalty, which grows."""
        count = sum(weight.numel() for weight in self.weights.values())
        self._pull.fill_(self.penalty * self.growth / count)

    def combine_(self) -> None:
        """Adds the gradient of the penalty to that of S."""
        super().combine_()
        gradients = gradients_of(self._scores)
        slopes = sigmoid_slopes(torch._foreach_sigmoid(list(self._scores.values())))
        torch._foreach_mul_(slopes, [self._pull.to(slope) for slope in slopes])
        pulls = dict(zip(self._scores, slopes, strict=True))
        if gradients:
            torch._foreach_add_([pulls[name] for name in gradients], list(gradients.values()))
        for name, score in self._scores.items():
            score.grad = pulls[name]


def _logit(p: float) -> float:
    """Returns the number whose sigmoid is p."""
    return math.log(p / (1 - p)) if p > 0 else -math.inf
