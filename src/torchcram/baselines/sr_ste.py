"""Sparse-refined straight-through estimator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchcram.baselines.base import Baseline
from torchcram.baselines.scores import gradients_of
from torchcram.layers import local_weights
from torchcram.sharding import local

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.operators import Operator
    from torchcram.weights import Weights


class SRSTE(Baseline):
    """w <- w - lr (grad L(M * w) + decay (1 - M) * w), with M = C(w) anew at every step.

    Zhou et al., "Learning N:M fine-grained structured sparse neural networks from scratch", ICLR
    2021. The decay pulls pruned weights to zero, so that the mask settles.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps.
        operator: Target, such as "nm:2:4".
        decay: Factor of the decay of pruned weights.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If `decay` is negative.
    """

    moves = True

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        decay: float = 2e-4,
        weights: Weights | None = None,
    ) -> None:
        if not decay >= 0:
            raise ValueError(f"decay must be at least 0, got {decay}")
        super().__init__(model, base, operator, weights=weights)
        self.decay = decay

    def update_masks(self) -> None:
        """Selects M by the magnitudes of the dense weights, at every step."""
        self.set_masks(self.operator.select(local_weights(self.weights)))

    def combine_(self) -> None:
        """Adds the decay of pruned weights: g~ = g + decay (1 - M) * w."""
        gradients = gradients_of(self.weights)
        pruned = [local(self.weights[name]).masked_fill(self.masks[name], 0) for name in gradients]
        if pruned:
            torch._foreach_add_(list(gradients.values()), pruned, alpha=self.decay)
