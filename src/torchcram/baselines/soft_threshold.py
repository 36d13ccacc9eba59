"""Soft threshold reparameterization (STR)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torchcram.baselines.base import Baseline
from torchcram.baselines.scores import (
    as_magnitudes,
    in_layers,
    per_layer,
    set_magnitudes_,
    shortfall,
)
from torchcram.weights import apply_masks_, mask_gradients_

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.operators import Operator
    from torchcram.weights import Masks, Weights


class STR(Baseline):
    """w~ = sign(w) relu(|w| - t) with a threshold t = sigmoid(s) that every layer learns.

        M       = |w| > t
        grad w  = M * grad L(w~)
        grad s  = -t (1 - t) sum(M * sign(w) * grad L(w~))

    Kusupati et al., "Soft threshold weight reparameterization for learnable sparsity", ICML 2020.
    Weight decay pulls s to zero and so raises the thresholds: together with `initial` it decides
    the sparsity, which follows no schedule. The value of the paper, -3200, goes with its 100 epochs
    on ImageNet; shorter trainings, and weight decay that is decoupled as in AdamW, need one nearer
    to zero. At the end the Top-K of |w| - t remain. If the thresholds have pruned more than that,
    they are all lowered by one amount, in each layer where the target is one of each layer.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps, also those of s.
        operator: Target, such as "global:0.9".
        initial: Initial value of s.
        threshold_lr: Learning rate of s; by default that of the weights.
        threshold_decay: Weight decay of s; by default that of the weights.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If an argument is out of range, or the model is sharded.
    """

    moves = True

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        initial: float = -3200.0,
        threshold_lr: float | None = None,
        threshold_decay: float | None = None,
        weights: Weights | None = None,
    ) -> None:
        if not math.isfinite(initial):
            raise ValueError(f"initial must be a finite number, got {initial}")
        for name, value in (("threshold_lr", threshold_lr), ("threshold_decay", threshold_decay)):
            if value is not None and not value >= 0:
                raise ValueError(f"{name} must be None or at least 0, got {value}")
        super().__init__(model, base, operator, weights=weights)
        self.require_whole()
        self._s = {name: s.fill_(initial) for name, s in per_layer(self.weights).items()}
        self.train_also("thresholds", self._s, lr=threshold_lr, weight_decay=threshold_decay)

    @property
    def thresholds(self) -> dict[str, Tensor]:
        """Thresholds t by the names of the weights, with an entry for every layer of a weight."""
        return {name: s.sigmoid() for name, s in self._s.items()}

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the parameters s of the thresholds."""
        return {"thresholds": self._s}

    def scores(self) -> dict[str, Tensor]:
        """Returns |w| - t, which is negative where a weight is pruned."""
        return {
            name: (in_layers(self.weights, name).abs() - threshold).flatten(0, 1)
            for name, threshold in self.thresholds.items()
        }

    def update_masks(self) -> None:
        """Marks what the thresholds prune: M = |w| > t."""
        self.set_masks({name: score > 0 for name, score in self.scores().items()})

    def move_(self) -> None:
        """Moves to w~."""
        self._shrink_(self.thresholds)
        apply_masks_(self.weights, self.masks)

    def combine_(self) -> None:
        """Derives the gradients of w and of s from the gradient at w~."""
        mask_gradients_(self.weights, self.masks)
        for name, threshold in self.thresholds.items():
            gradient = self.weights[name].grad
            if gradient is None:
                self._s[name].grad = None
                continue
            inward = in_layers(self.weights, name, gradient) * in_layers(self.weights, name).sign()
            layer = tuple(range(1, inward.dim()))
            total = inward.sum(layer, keepdim=True, dtype=threshold.dtype)
            self._s[name].grad = -threshold * (1 - threshold) * total

    def final_masks(self) -> Masks:
        """Returns the masks of the largest |w| - t."""
        return self.operator.select(as_magnitudes(self.weights, self.scores()))

    def final_weights_(self) -> None:
        """Moves to w~ for good; thresholds above a kept weight are lowered first."""
        lower = shortfall(self.operator, self.weights, self.scores(), self.masks)
        self._shrink_({name: (t - lower[name]).clamp(min=0) for name, t in self.thresholds.items()})

    def _shrink_(self, thresholds: Mapping[str, Tensor]) -> None:
        """Brings weights nearer to zero by their threshold, but none to zero itself."""
        for name, threshold in thresholds.items():
            weight = in_layers(self.weights, name)
            set_magnitudes_(weight, weight.abs() - threshold)
