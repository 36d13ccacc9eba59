"""Activation-aware magnitudes: Wanda."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchcram.layers import like
from torchcram.pruners.activations import (
    as_matrices,
    from_matrices,
    layers_of,
    split_by_sight,
    square_sums,
)
from torchcram.pruners.base import Pruner
from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torchcram.pruners.base import Calibration
    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class Wanda(Pruner):
    """Keeps the weights of the largest score_ij = |w_ij| ||x_j||_2, x_j being input j of the layer.

    The inputs are those of the dense model, all layers at once: one pass over the batches. The
    others are zeroed, none is changed. The paper compares within every output: `RowTopK` or `NM`.
    """

    kind: ClassVar[str] = "wanda"

    def prune_(self, weights: Weights, calibration: Calibration) -> Masks:
        """Scores, selects, zeroes; by magnitude where the inputs cannot be seen."""
        seen, hidden = split_by_sight(str(self), calibration.model, weights)
        layers = layers_of(calibration.model, seen)
        scores = {}
        for name, squares in square_sums(calibration, seen).items():
            matrices = as_matrices(seen, name, layers[name][0])
            norms = squares.sqrt().unsqueeze(1).to(matrices.device)  # (groups, 1, inputs)
            scores[name] = from_matrices(seen, name, (matrices.abs() * norms).float())
        ordered = {name: scores[name] for name in seen}  # ties are broken in this order
        masks = {**self.pattern.select(like(seen, ordered)), **self.pattern.select(hidden)}
        apply_masks_(weights, masks)
        return {name: masks[name] for name in weights}
