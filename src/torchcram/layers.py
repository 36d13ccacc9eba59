"""Weights as the layers behind them use them, whole or the rows that one process holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from torchcram.sharded import Part, is_sharded, local, part_of

if TYPE_CHECKING:
    import torch

Weights = Mapping[str, Tensor]
"""Compressible weights by parameter name; a tied weight appears once."""

Masks = Mapping[str, Tensor]
"""Boolean masks with the keys and shapes of the weights; True keeps."""


class LayerWeights(dict[str, Tensor]):
    """Weights that remember how their layers use them and how they are spread over processes.

    Operators work on any mapping; this one also tells them where the outputs and inputs of each
    weight are. Weights in a plain mapping count as those of Linear and ordinary convolution layers.

    Attributes:
        transposed: the groups of the layers that are transposed convolutions.
        parts: which rows of a weight are on this process, where that is not all of them.
        sharded: whether some are DTensors still, whose rows here `local()` gives.
    """

    def __init__(
        self,
        weights: Weights,
        transposed: Mapping[str, int] | None = None,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        super().__init__(weights)
        self.transposed = dict(transposed or {})
        self.sharded = any(map(is_sharded, self.values()))
        self.parts = dict(parts or {})
        if self.sharded:
            found = {name: part_of(name, weight) for name, weight in self.items()}
            self.parts = {name: part for name, part in found.items() if part is not None}

    def local(self) -> LayerWeights:
        """Returns what this process holds of the weights, in the same memory."""
        if not self.sharded:
            return self
        here = {name: local(weight) for name, weight in self.items()}
        return LayerWeights(here, self.transposed, self.parts)


def local_weights(weights: Weights) -> Weights:
    """Returns what this process holds of `weights`; nothing changes where they are whole."""
    return weights.local() if isinstance(weights, LayerWeights) else weights


def part_here(weights: Weights, name: str) -> Part | None:
    """Returns which rows of a weight `weights` hold; None for all of them."""
    parts: Mapping[str, Part] = getattr(weights, "parts", {})
    return parts.get(name)


def whole_shape(weights: Weights, name: str) -> torch.Size:
    """Returns the shape of a weight, with the rows on other processes."""
    part = part_here(weights, name)
    return weights[name].shape if part is None else part.shape


def reduction_last(weights: Weights, name: str, tensor: Tensor | None = None) -> Tensor:
    """Views a weight as (groups, outputs, *kernel positions, inputs): sums run over the last one.

    Args:
        weights: all weights.
        name: of the one to view; `cut_inputs` is None for it.
        tensor: something of its shape, its mask say, to view in its stead.
    """
    tensor = weights[name] if tensor is None else tensor
    _require_inputs(name, tensor)
    groups = _groups_if_transposed(weights, name)
    if groups is None:  # (outputs, inputs, *kernel)
        return tensor.unsqueeze(0).movedim(2, -1)
    view: Tensor = tensor.unflatten(0, (groups, -1))  # (groups, inputs, outputs, *kernel)
    return view.movedim(1, -1)


def count_inputs(weights: Weights, name: str) -> int:
    """Returns over how many inputs an output of a layer sums, per position of the kernel."""
    shape = whole_shape(weights, name)
    _require_inputs(name, weights[name])
    groups = _groups_if_transposed(weights, name)
    return shape[1] if groups is None else shape[0] // groups


def cut_inputs(weights: Weights, name: str) -> Part | None:
    """Returns which inputs of a layer are here, where its inputs are what is cut, else None.

    Rows are outputs, and each of them is whole; only in transposed convolutions they are inputs.
    """
    transposed = _groups_if_transposed(weights, name) is not None
    return part_here(weights, name) if transposed else None


def _groups_if_transposed(weights: Weights, name: str) -> int | None:
    transposed: Mapping[str, int] = getattr(weights, "transposed", {})
    return transposed.get(name)


def _require_inputs(name: str, tensor: Tensor) -> None:
    if tensor.dim() < 2:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name!r} of shape {shape} has no output and input dimension")
