"""The order in which a chain of convolutions computes rows, so that few of them are in memory."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from torchcram.runtime.cpu.packing import Geometry

NO_RESIDUAL = -1
_NUMBERS = 12  # of a layer in the arguments of the operator


class ChainLayer(NamedTuple):
    """A convolution of a chain.

    Attributes:
        source: Number of the value that it reads: 0 is the input of the chain, i + 1 the output of
            layer i.
        residual: Number of the value that is added to its outputs, or `NO_RESIDUAL`.
        features: Number of output channels.
        relu: Whether ReLU follows.
        geometry: Geometry of the convolution.
    """

    source: int
    residual: int
    features: int
    relu: bool
    geometry: Geometry

    def numbers(self) -> list[int]:
        """Returns the layer as numbers, for the arguments of the operator."""
        g = self.geometry
        pairs = (*g.kernel, *g.stride, *g.padding, *g.dilation)
        return [self.source, self.residual, self.features, int(self.relu), *pairs]


class Step(NamedTuple):
    """Rows of outputs, from `first` up to, not including, `end`, that a layer computes."""

    layer: int
    first: int
    end: int


class ChainPlan(NamedTuple):
    """How a chain runs on images of one size.

    Attributes:
        steps: Steps in their order.
        sizes: Rows and columns of each value.
        rings: Number of rows in the ring buffer of each value.
    """

    steps: tuple[Step, ...]
    sizes: tuple[tuple[int, int], ...]
    rings: tuple[int, ...]


def chain_layers(numbers: Sequence[int]) -> tuple[ChainLayer, ...]:
    """Returns the layers that `ChainLayer.numbers` describes, one after another.

    Raises:
        ValueError: If there are no layers, or one reads a value that no earlier layer computes.
    """
    if not numbers or len(numbers) % _NUMBERS:
        raise ValueError(
            f"a chain needs at least one layer, and {_NUMBERS} numbers for each, got {len(numbers)}"
        )
    layers: list[ChainLayer] = []
    for at in range(0, len(numbers), _NUMBERS):
        source, residual, features, relu, *pairs = numbers[at : at + _NUMBERS]
        made = len(layers) + 1
        if not 0 <= source < made or not NO_RESIDUAL <= residual < made:
            raise ValueError(f"layer {made - 1} of a chain reads {source} and {residual}")
        geometry = Geometry(*((pairs[i], pairs[i + 1]) for i in range(0, 8, 2)))
        layers.append(ChainLayer(source, residual, features, bool(relu), geometry))
    return tuple(layers)


@functools.lru_cache(maxsize=256)
def plan_chain(layers: tuple[ChainLayer, ...], size: tuple[int, int], rows: int) -> ChainPlan:
    """Plans a chain from the end: each layer computes the rows that the next ones need.

    Args:
        layers: Layers of the chain; the last one has its output.
        size: Rows and columns of an image at the input of the chain.
        rows: Number of rows of the output to compute at a time.

    Raises:
        ValueError: If an image is too small for a kernel, or a residual has another size.
    """
    sizes = [size]
    for layer in layers:
        out = layer.geometry.output(*sizes[layer.source])
        if min(out) < 1:
            raise ValueError(f"the kernel does not fit images of {sizes[layer.source]}: {layer}")
        if layer.residual != NO_RESIDUAL and sizes[layer.residual] != out:
            raise ValueError(f"a residual of {sizes[layer.residual]} cannot be added to {out}")
        sizes.append(out)
    done = [0] * len(layers)
    rings = [1] * len(sizes)
    steps = []
    for end in range(min(rows, sizes[-1][0]), sizes[-1][0] + rows, rows):
        needed = [0] * len(sizes)
        needed[-1] = min(end, sizes[-1][0])
        for number in reversed(range(len(layers))):
            layer, last = layers[number], max(needed[number + 1], done[number])
            if last > done[number]:
                read = min(_last_input(layer.geometry, last - 1) + 1, sizes[layer.source][0])
                needed[layer.source] = max(needed[layer.source], read)
                if layer.residual != NO_RESIDUAL:
                    needed[layer.residual] = max(needed[layer.residual], last)
        for number in range(len(layers)):
            last = needed[number + 1]
            if last > done[number]:
                oldest = min(_oldest_needed(layers, number + 1, done), done[number])
                rings[number + 1] = max(rings[number + 1], last - oldest)
                steps.append(Step(number, done[number], last))
                done[number] = last
    rings[0], rings[-1] = sizes[0][0], sizes[-1][0]  # whole tensors
    return ChainPlan(tuple(steps), tuple(sizes), tuple(rings))


def _last_input(geometry: Geometry, row: int) -> int:
    """Returns the last row that a row of outputs reads, not limited to those of the image."""
    first = row * geometry.stride[0] - geometry.padding[0]
    return first + (geometry.kernel[0] - 1) * geometry.dilation[0]


def _oldest_needed(layers: Sequence[ChainLayer], value: int, done: Sequence[int]) -> int:
    """Returns the first row of a value that layers will still read."""
    rows = []
    for number, layer in enumerate(layers):
        if layer.source == value:
            first = done[number] * layer.geometry.stride[0] - layer.geometry.padding[0]
            rows.append(max(first, 0))
        if layer.residual == value:
            rows.append(done[number])
    return min(rows, default=0)
