"""Weights together with how their layers use them and which rows this rank holds."""

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
    """Layout of a weight: which dimensions are outputs and inputs, and how many layers it holds.

    The default is the weight of a Linear or ordinary convolution layer: (outputs, inputs, *kernel).

    Attributes:
        transposed: Whether the inputs come before the outputs: (inputs, outputs, *kernel).
        groups: Number of groups of a transposed convolution, one after another along dimension 0.
        layers: Number of layers in the weight, one after another along dimension 0: three for the
            q, k and v of attention, the number of experts for a mixture of experts.
        stacked: Whether dimension 0 counts only layers: (layers, outputs, inputs).
    """

    transposed: bool = False
    groups: int = 1
    layers: int = 1
    stacked: bool = False


PLAIN = Layout()


class LayerWeights(dict[str, Tensor]):
    """Weights by name, with their layouts and their shards.

    Operators work on any mapping; this one also tells them which dimensions of each weight are
    outputs and inputs. Weights in a plain mapping are treated as those of Linear and ordinary
    convolution layers.

    Attributes:
        layouts: Layouts by name, of those weights that differ from Linear layers.
        parts: Rows of each weight on this rank, by name, of those weights that are sharded.
        sharded: Whether some weights are DTensors, whose local rows `local()` returns.
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
            every = {name: part_of(name, weight) for name, weight in self.items()}
            self.parts = {name: part for name, part in every.items() if part is not None}

    def local(self) -> LayerWeights:
        """Returns the rows of the weights on this rank, in the same memory."""
        if not self.sharded:
            return self
        shards = {name: local(weight) for name, weight in self.items()}
        return LayerWeights(shards, self.layouts, self.parts)


def local_weights(weights: Weights) -> Weights:
    """Returns the rows of `weights` on this rank; weights that are not sharded stay unchanged."""
    return weights.local() if isinstance(weights, LayerWeights) else weights


def some_of(weights: Weights, names: Iterable[str]) -> LayerWeights:
    """Returns the weights of these names, with their layouts and shards."""
    return like(weights, {name: weights[name] for name in names})


def like(weights: Weights, tensors: Weights) -> LayerWeights:
    """Returns `tensors`, such as scores, with the layouts and shards of the weights they name."""
    layouts: Mapping[str, Layout] = getattr(weights, "layouts", {})
    parts: Mapping[str, Part] = getattr(weights, "parts", {})
    return LayerWeights(
        tensors,
        {name: layouts[name] for name in tensors if name in layouts},
        {name: parts[name] for name in tensors if name in parts},
    )


def layout_of(weights: Weights, name: str) -> Layout:
    """Returns the layout of a weight."""
    layouts: Mapping[str, Layout] = getattr(weights, "layouts", {})
    return layouts.get(name, PLAIN)


def part_here(weights: Weights, name: str) -> Part | None:
    """Returns which rows of a weight are on this rank; None if all of them are."""
    parts: Mapping[str, Part] = getattr(weights, "parts", {})
    return parts.get(name)


def whole_shape(weights: Weights, name: str) -> torch.Size:
    """Returns the shape of a weight, with the rows on other ranks."""
    part = part_here(weights, name)
    return weights[name].shape if part is None else part.shape


def reduction_last(weights: Weights, name: str, tensor: Tensor | None = None) -> Tensor:
    """Views a weight as (groups, outputs, *kernel positions, inputs): products sum over the last.

    The groups are those of a transposed convolution, or the experts of a mixture; q, k and v of
    attention are outputs of one group.

    Args:
        weights: All weights.
        name: Name of the weight to view; `cut_inputs` is None for it.
        tensor: Tensor of the same shape, such as a mask, to view instead of the weight.
    """
    tensor = weights[name] if tensor is None else tensor
    layout = layout_of(weights, name)
    _require_inputs(name, tensor, layout)
    groups = tensor if layout.stacked else tensor.unflatten(0, (layout.groups, -1))
    view: Tensor = groups.movedim(1 if layout.transposed else 2, -1)
    return view


def count_inputs(weights: Weights, name: str) -> int:
    """Returns the number of inputs that an output of a layer sums over, per kernel position."""
    shape = whole_shape(weights, name)
    layout = layout_of(weights, name)
    _require_inputs(name, weights[name], layout)
    if layout.stacked:
        return shape[1 if layout.transposed else 2]
    return shape[0] // layout.groups if layout.transposed else shape[1]


def cut_inputs(weights: Weights, name: str) -> Part | None:
    """Returns which inputs of a layer are on this rank, if sharding splits its inputs, else None.

    Usually rows are outputs or experts, and each of them is whole. In layers with their inputs
    first, such as transposed convolutions, rows are inputs.
    """
    layout = layout_of(weights, name)
    return part_here(weights, name) if layout.transposed and not layout.stacked else None


def split_layers(weights: Weights, name: str) -> list[Tensor]:
    """Returns the local rows of each layer that a weight holds, as views; usually it holds one."""
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
