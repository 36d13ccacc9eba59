"""Activation-aware magnitudes: Wanda."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchcram.layers import LayerWeights
from torchcram.pruners.activations import as_matrices, from_matrices, layers_of, square_sums
from torchcram.pruners.base import Pruner
from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torchcram.pruners.calibration import Calibration
    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class Wanda(Pruner):
    """Keeps the weights of the largest score_ij = |w_ij| ||x_j||_2, x_j being input j of the layer.

    The inputs are those of the dense model, all layers at once: one pass over the batches. The
    others are zeroed, none is changed. The paper compares within every output: `RowTopK` or `NM`.
    """

    kind: ClassVar[str] = "wanda"

    def prune_(self, weights: Weights, calibration: Calibration) -> Masks:
        """Scores, selects, zeroes."""
        layers = layers_of(calibration.model, weights)
        scores = {}
        for name, squares in square_sums(calibration, weights).items():
            matrices = as_matrices(weights, name, layers[name][0])
            norms = squares.sqrt().unsqueeze(1).to(matrices.device)  # (groups, 1, inputs)
            scores[name] = from_matrices(weights, name, (matrices.abs() * norms).float())
        ordered = {name: scores[name] for name in weights}  # ties are broken in this order
        masks = self.pattern.select(LayerWeights(ordered))
        apply_masks_(weights, masks)
        return masks
