"""Soft threshold reparameterization (STR)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from torchcram.baselines.base import Baseline
from torchcram.baselines.scores import (
    as_magnitudes,
    each_in_layers,
    gradients_of,
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
        return dict(zip(self._s, torch._foreach_sigmoid(list(self._s.values())), strict=True))

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
        magnitudes = torch._foreach_abs(each_in_layers(self.weights))
        masks = each_in_layers(self.weights, self.masks)
        for mask, magnitude, t in zip(masks, magnitudes, self.thresholds.values(), strict=True):
            torch.gt(magnitude, t, out=mask)

    def move_(self) -> None:
        """Moves to w~, in which no kept weight is zero."""
        weights = each_in_layers(self.weights)
        signs = torch._foreach_sign(weights)
        torch._foreach_abs_(weights)
        torch._foreach_sub_(weights, list(self.thresholds.values()))
        torch._foreach_clamp_min_(weights, [torch.finfo(weight.dtype).tiny for weight in weights])
        torch._foreach_mul_(weights, signs)
        apply_masks_(self.weights, self.masks)

    def combine_(self) -> None:
        """Derives the gradients of w and of s from the gradient at w~."""
        mask_gradients_(self.weights, self.masks)
        gradients = gradients_of(self.weights)
        for s in self._s.values():
            s.grad = None
        if not gradients:
            return
        inward = torch._foreach_sign([self.weights[name] for name in gradients])
        torch._foreach_mul_(inward, list(gradients.values()))
        layers = each_in_layers(self.weights, dict(zip(gradients, inward, strict=True)))
        thresholds = torch._foreach_sigmoid([self._s[name] for name in gradients])
        slopes = torch._foreach_mul(thresholds, torch._foreach_sub(thresholds, 1))  # -t (1 - t)
        totals = [
            layer.sum(tuple(range(1, layer.dim())), keepdim=True, dtype=slope.dtype)
            for layer, slope in zip(layers, slopes, strict=True)
        ]
        torch._foreach_mul_(slopes, totals)
        for name, slope in zip(gradients, slopes, strict=True):
            self._s[name].grad = slope

    def final_masks(self) -> Masks:
        """Returns the masks of the largest |w| - t."""
        return self.operator.select(as_magnitudes(self.weights, self.scores()))

    def final_weights_(self) -> None:
        """Moves to w~ for good; thresholds above a kept weight are lowered first."""
        lower = shortfall(self.operator, self.weights, self.scores(), self.masks)
        for name, threshold in self.thresholds.items():
            weight = in_layers(self.weights, name)
            set_magnitudes_(weight, weight.abs() - (threshold - lower[name]).clamp(min=0))
