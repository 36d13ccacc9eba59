"""Magnitude pruning in which every output keeps its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchcram.keys import magnitude_keys
from torchcram.layers import cut_inputs, local_weights, reduction_last
from torchcram.operators import UniformTopK
from torchcram.selection import count_kept

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class RowTopK(UniformTopK):
    """Keeps the n - round(sparsity n) largest of the n weights of each output, exactly.

    n is what an output sums over: the inputs of a Linear layer, inputs times kernel positions of a
    convolution.
    """

    @torch.no_grad()
    def select(self, scores: Weights) -> Masks:
        """Keeps the largest scores of every output; ties go to the earlier one."""
        scores = local_weights(scores)
        masks = {}
        for name, score in scores.items():
            if cut_inputs(scores, name) is not None:
                raise ValueError(f"{self}: the rows of {name!r} are cut between processes")
            view = reduction_last(scores, name)
            rows = view.flatten(2)  # (groups, outputs, kernel x inputs)
            kept = keep_in_rows(rows, count_kept(rows.shape[-1], self.level))
            masks[name] = torch.empty_like(score, dtype=torch.bool)
            reduction_last(scores, name, masks[name]).copy_(kept.view(view.shape))
        return masks

    def __str__(self) -> str:
        return self._text("row")


def keep_in_rows(rows: Tensor, keep: int) -> Tensor:
    """Returns the mask of the `keep` largest magnitudes along the last dimension, exactly."""
    order = magnitude_keys(rows).argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    return mask.scatter_(-1, order[..., :keep], True)
