"""Weights as the layers behind them use them, whole or the rows that one process holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from torchcram.sharding import Part, is_sharded, local, part_of

if TYPE_CHECKING:
    import torch

Weights = Mapping[str, Tensor]
"""Compressible weights by parameter name; a tied weight appears once."""

Masks = Mapping[str, Tensor]
"""Boolean masks with the keys and shapes of the weights; True keeps."""


@dataclass(frozen=True)
class Layout:
    """How a layer uses its weight: where the outputs and inputs are, how many layers it holds.

    The default is the weight of a Linear or ordinary convolution layer: (outputs, inputs, *kernel).

    Attributes:
        transposed: Whether the inputs come before the outputs: (inputs, outputs, *kernel).
        groups: Number of groups of a transposed convolution, one after another along dimension 0.
        layers: Number of layers in the weight, one after another along dimension 0: three for the
            q, k and v of attention, as many as there are experts for those of a mixture.
        stacked: Whether dimension 0 is that of the layers alone: (layers, outputs, inputs).
    """

    transposed: bool = False
    groups: int = 1
    layers: int = 1
    stacked: bool = False


PLAIN = Layout()


class LayerWeights(dict[str, Tensor]):
    """Weights that remember how their layers use them and how they are spread over processes.

    Operators work on any mapping; this one also tells them where the outputs and inputs of each
    weight are. Weights in a plain mapping count as those of Linear and ordinary convolution layers.

    Attributes:
        layouts: How layers use their weights, by name, where that is not as Linear layers do.
        parts: Rows of each weight on this process, where these are not all of them.
        sharded: Whether some are DTensors still, whose rows here `local()` gives.
    """

    def __init__(
        self,
        weights: Weights,
        layouts: Mapping[str, Layout] | None = None,
        parts: Mapping[str, Part] | None = None,
    ) -> None:
        super().__init__(weights)
        self.layouts = dict(layouts or {})
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
        return LayerWeights(here, self.layouts, self.parts)


def local_weights(weights: Weights) -> Weights:
    """Returns what this process holds of `weights`; nothing changes where they are whole."""
    return weights.local() if isinstance(weights, LayerWeights) else weights


def some_of(weights: Weights, names: Iterable[str]) -> LayerWeights:
    """Returns the weights of these names, with what is known of their layers."""
    return like(weights, {name: weights[name] for name in names})


def like(weights: Weights, tensors: Weights) -> LayerWeights:
    """Returns `tensors`, scores say, with the layers and the rows of the weights of their names."""
    layouts: Mapping[str, Layout] = getattr(weights, "layouts", {})
    parts: Mapping[str, Part] = getattr(weights, "parts", {})
    return LayerWeights(
        tensors,
        {name: layouts[name] for name in tensors if name in layouts},
        {name: parts[name] for name in tensors if name in parts},
    )


def layout_of(weights: Weights, name: str) -> Layout:
    """Returns how the layer behind a weight uses it."""
    layouts: Mapping[str, Layout] = getattr(weights, "layouts", {})
    return layouts.get(name, PLAIN)


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

    The groups are those of a transposed convolution, or the experts of a mixture; q, k and v of
    attention are outputs of one group.

    Args:
        weights: All weights.
        name: Name of the weight to view; `cut_inputs` is None for it.
        tensor: Tensor of the same shape, a mask say, to view in its stead.
    """
    tensor = weights[name] if tensor is None else tensor
    layout = layout_of(weights, name)
    _require_inputs(name, tensor, layout)
    groups = tensor if layout.stacked else tensor.unflatten(0, (layout.groups, -1))
    view: Tensor = groups.movedim(1 if layout.transposed else 2, -1)
    return view


def count_inputs(weights: Weights, name: str) -> int:
    """Returns over how many inputs an output of a layer sums, per position of the kernel."""
    shape = whole_shape(weights, name)
    layout = layout_of(weights, name)
    _require_inputs(name, weights[name], layout)
    if layout.stacked:
        return shape[1 if layout.transposed else 2]
    return shape[0] // layout.groups if layout.transposed else shape[1]


def cut_inputs(weights: Weights, name: str) -> Part | None:
    """Returns which inputs of a layer are here, where its inputs are what is cut, else None.

    Rows are outputs or experts, and each of them is whole; but where the inputs come first, as in
    transposed convolutions, rows are inputs.
    """
    layout = layout_of(weights, name)
    return part_here(weights, name) if layout.transposed and not layout.stacked else None


def split_layers(weights: Weights, name: str) -> list[Tensor]:
    """Returns what is here of each layer that a weight holds, as views; mostly it holds one."""
    weight, layers = weights[name], layout_of(weights, name).layers
    if layers == 1:
        return [weight]
    part = part_here(weights, name)
    here = range(len(weight)) if part is None else part.here
    rows = whole_shape(weights, name)[0] // layers
    ends = [
        min(max(rows * layer, here.start), here.stop) - here.start for layer in range(1, layers)
    ]
    return list(weight.tensor_split(ends))


def _require_inputs(name: str, tensor: Tensor, layout: Layout) -> None:
    if tensor.dim() < 2 + layout.stacked:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name!r} of shape {shape} has no output and input dimension")
