"""SparseGPT: pruning that reconstructs the outputs of one layer after another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from torchcram.layers import count_inputs, some_of
from torchcram.operators import NM, RowTopK, UniformTopK
from torchcram.pruners.activations import (
    as_matrices,
    from_matrices,
    layers_of,
    split_by_visible_inputs,
)
from torchcram.pruners.base import Pruner, require_damping
from torchcram.pruners.propagation import products_in_order
from torchcram.selection import count_kept, keep_largest, keep_largest_in_rows

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.pruners.base import Calibration
    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class SparseGPT(Pruner):
    """Keeps the outputs of a layer: min ||W X - W' X||^2 over sparse W', greedily by columns.

    ::

        H = X X^T + damping mean(diag X X^T) I,   H^-1 = U^T U with U upper triangular
        score_ij = (w_ij / U_jj)^2                the error of dropping w_ij if all later columns
                                                  compensate for it
        w_i,k -= w_ij / U_jj U_jk, k > j          the compensation

    Masks are chosen for `block` columns at a time, N:M masks for one group at a time, from the
    weights as compensated so far. Layers are pruned in the order of the forward pass, each with the
    inputs that the pruned layers before it produce.

    Attributes:
        pattern: UniformTopK, RowTopK or NM. The counts are exact: a block keeps the share of all
            columns up to its end, minus what earlier blocks keep.
        damping: Damping as a share of the mean diagonal.
        block: Number of columns whose mask is chosen at once, rounded up to whole groups of N:M.
    """

    kind: ClassVar[str] = "sparsegpt"
    letters: ClassVar[Mapping[str, str]] = {"b": "block", "d": "damping"}
    damping: float = 0.01
    block: int = 128

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.pattern, (UniformTopK, NM)):
            raise ValueError(
                f"SparseGPT: {self.pattern} is impossible, as layers are pruned one after another; "
                "allowed are uniform, row and nm patterns"
            )
        require_damping(self, self.damping)
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise ValueError(f"SparseGPT: block is {self.block!r}, allowed are integers from 1")

    def prune_(self, weights: Weights, calibration: Calibration) -> Masks:
        """Prunes by magnitude the layers with hidden inputs, then the others one by one."""
        visible, hidden = split_by_visible_inputs(str(self), calibration.model, weights)
        layers = layers_of(calibration.model, visible)
        masks: dict[str, Tensor] = dict(self.pattern.compress_(hidden))
        for grams in products_in_order(calibration, visible):
            for name, gram in grams.items():
                layer = some_of(visible, [name])
                if isinstance(self.pattern, NM) and count_inputs(layer, name) % self.pattern.group:
                    masks |= self.pattern.select(layer)  # left dense, and named in a warning
                    continue
                matrices = as_matrices(layer, name, layers[name][0])
                upper = _upper(gram, self.damping).to(matrices.device)
                pruned, kept = self._reconstruct(matrices, upper)
                weights[name].copy_(from_matrices(layer, name, pruned))
                masks[name] = from_matrices(layer, name, kept)
        return {name: masks[name] for name in weights}

    def _reconstruct(self, matrices: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
        """Returns W' and its mask; `matrices` is (groups, outputs, inputs)."""
        w = matrices.to(upper.dtype, copy=True)
        kept = torch.ones_like(w, dtype=torch.bool)
        scale = upper.diagonal(dim1=1, dim2=2).unsqueeze(1)  # U_jj as (groups, 1, inputs)
        every = self._columns_at_once()
        for start in range(0, w.shape[-1], self._block()):
            end = min(start + self._block(), w.shape[-1])
            errors = torch.zeros_like(w[..., start:end])
            for j in range(start, end):
                if (j - start) % every == 0:
                    some = slice(j, min(j + every, end))
                    kept[..., some] = self._select(w[..., some] / scale[..., some], j, w.shape[-1])
                dropped = w[..., j].masked_fill(kept[..., j], 0)
                error = dropped / scale[..., j]
                w[..., j:end] -= error.unsqueeze(-1) * upper[:, j : j + 1, j:end]
                errors[..., j - start] = error
            w[..., end:] -= errors @ upper[:, start:end, end:]
        return w.masked_fill_(kept.logical_not(), 0), kept

    def _block(self) -> int:
        group = self.pattern.group if isinstance(self.pattern, NM) else 1
        return -(-self.block // group) * group

    def _columns_at_once(self) -> int:
        return self.pattern.group if isinstance(self.pattern, NM) else self._block()

    def _select(self, scores: Tensor, start: int, columns: int) -> Tensor:
        """Returns the mask of columns from `start` on; `scores` is (groups, outputs, columns)."""
        if isinstance(self.pattern, UniformTopK):
            end = start + scores.shape[-1]
            rows = 1 if isinstance(self.pattern, RowTopK) else scores[..., 0].numel()
            keep = self._kept(rows, end, columns) - self._kept(rows, start, columns)
            if isinstance(self.pattern, RowTopK):
                return keep_largest_in_rows(scores, keep)
            return keep_largest([scores.contiguous()], keep)[0]
        return self.pattern.select({"": scores.flatten(0, 1)})[""].view(scores.shape)

    def _kept(self, rows: int, columns: int, of: int) -> int:
        """Returns how many weights in the first columns are kept; exact at the last column."""
        assert isinstance(self.pattern, UniformTopK)  # noqa: S101
        return count_kept(rows * of, self.pattern.level) * columns // of


def _upper(gram: Tensor, damping: float) -> Tensor:
    """Returns U of H^-1 = U^T U, from X X^T as (groups, inputs, inputs)."""
    hessian = gram.double()
    diagonal = hessian.diagonal(dim1=1, dim2=2)
    extra = damping * diagonal.mean(1, keepdim=True)
    diagonal += extra.masked_fill(extra == 0, 1)  # all inputs are zero: rank by magnitude
    # with J reversing the order: J H J = L L^T, so H = A A^T with A = J L J upper, and U = A^-1
    a = torch.linalg.cholesky(hessian.flip(1, 2)).flip(1, 2)
    identity = torch.eye(a.shape[-1], dtype=a.dtype, device=a.device).expand_as(a)
    upper: Tensor = torch.linalg.solve_triangular(a, identity, upper=True)
    return upper.to(gram.dtype)
