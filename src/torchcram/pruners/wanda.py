"""Wanda: magnitudes weighted by the norms of the inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torchcram.layers import like
from torchcram.pruners.activations import (
    as_matrices,
    from_matrices,
    layers_of,
    split_by_visible_inputs,
    square_sums,
)
from torchcram.pruners.base import Pruner
from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torchcram.pruners.base import Calibration
    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class Wanda(Pruner):
    """Keeps the weights with the largest score_ij = |w_ij| ||x_j||_2, where x_j is input j.

    The inputs are those of the dense model, so that one pass over the batches serves all layers.
    Weights that are kept do not change. The paper compares weights within every output: use
    `RowTopK` or `NM`.
    """

    kind: ClassVar[str] = "wanda"

    def prune_(self, weights: Weights, calibration: Calibration) -> Masks:
        """Scores, selects and zeroes; prunes by magnitude where inputs cannot be observed."""
        visible, hidden = split_by_visible_inputs(str(self), calibration.model, weights)
        layers = layers_of(calibration.model, visible)
        scores = {}
        for name, squares in square_sums(calibration, visible).items():
            matrices = as_matrices(visible, name, layers[name][0])
            norms = squares.sqrt().unsqueeze(1).to(matrices.device)  # (groups, 1, inputs)
            scores[name] = from_matrices(visible, name, (matrices.abs() * norms).float())
        ordered = {name: scores[name] for name in visible}  # ties are broken in this order
        masks = {**self.pattern.select(like(visible, ordered)), **self.pattern.select(hidden)}
        apply_masks_(weights, masks)
        return {name: masks[name] for name in weights}
