"""Graphs of image models in parts, each of which runs on as many images at a time as suits it.

Panels of 16 images are the fastest way to convolve, but the activations of 16 large images do not
stay in the caches. An image with many pixels is therefore cut into 16 tiles that are computed like
16 images. Further layers have too few pixels for that: four images are cut into 4 tiles each, and
16 small ones stay whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, fx, nn

from torchcram.runtime.cpu.graph_nodes import sections
from torchcram.runtime.cpu.packing import NOT_CUT, PANEL_IMAGES
from torchcram.runtime.cpu.replace_layers import Tiles, geometry_of, sparsity_of, unsupported_reason

_LEAST_WIDTH = 4  # columns of a tile: kernels compute 4 neighbouring outputs together
_WAYS = ((1, (4, 4)), (4, (2, 2)), (PANEL_IMAGES, NOT_CUT))


def tiles_for(images: int) -> Tiles:
    """Returns the tiles that each image of a batch is cut into, to fill panels of 16 images."""
    return next(tiles for count, tiles in reversed(_WAYS) if images % count == 0)


@dataclass(frozen=True)
class Part:
    """A part of a graph.

    Attributes:
        graph: The part, with the names that its layers have in the whole graph.
        images: Number of images that it runs on at a time.
    """

    graph: fx.GraphModule
    images: int


def split_into_parts(model: fx.GraphModule, shapes: Mapping[str, tuple[int, ...]]) -> list[Part]:
    """Splits a graph wherever all that follows depends on a single result.

    A part runs on the fewest images at a time whose pixels, cut into tiles, fill the lanes of all
    its convolutions. Neighbouring parts with the same number of images become one.

    Args:
        model: Graph with one input; it stays unchanged.
        shapes: Shapes of the inputs of its layers, by name.
    """
    modules = dict(model.named_modules())
    parts: list[tuple[list[fx.Node], int]] = []
    for nodes in sections(model):
        layers = [
            (layer, shapes[str(node.target)])
            for node in nodes
            if node.op == "call_module" and str(node.target) in shapes
            if isinstance(layer := modules[str(node.target)], nn.Conv2d)
        ]
        before = parts[-1][1] if parts else 1
        images = _images_at_a_time(layers) if layers else before
        if parts and images == before:
            parts[-1][0].extend(nodes)
        else:
            parts.append((nodes, images))
    return [Part(_part_of(model, nodes), images) for nodes, images in parts]


def _images_at_a_time(layers: Iterable[tuple[nn.Conv2d, tuple[int, ...]]]) -> int:
    sparse = [
        (layer, (shape[2], shape[3]))
        for layer, shape in layers
        if unsupported_reason(layer) is None and sparsity_of(layer) > 0
    ]
    for images, tiles in _WAYS[:-1]:
        if all(
            geometry_of(layer).fits_tiles(size, tiles) and size[1] >= tiles[1] * _LEAST_WIDTH
            for layer, size in sparse
        ):
            return images
    return PANEL_IMAGES


def _part_of(model: fx.GraphModule, nodes: list[fx.Node]) -> fx.GraphModule:
    """Returns a graph of some nodes in a row; all but the first ones begin with a single input."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    within = set(nodes)
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in within and source not in copies:
                copies[source] = graph.placeholder("x")
        copies[node] = graph.node_copy(node, copies.__getitem__)
    if nodes[-1].op != "output":
        graph.output(copies[nodes[-1]])
    return fx.GraphModule(model, graph)


class ImageParts(nn.Sequential):
    """The parts of a graph one after another, each a `BatchSplitter` for its number of images."""


class ForImageSize(nn.Module):
    """Runs images of one size by a model that is made for it, and others by another model.

    Args:
        model: Model for images of this size.
        other: Model for images of any size.
        size: Rows and columns of the images.
    """

    def __init__(self, model: nn.Module, other: nn.Module, size: tuple[int, int]) -> None:
        super().__init__()
        self.model, self.other, self.size = model, other, size

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of a batch of images."""
        fits = x.dim() == 4 and (x.shape[2], x.shape[3]) == self.size
        output: Tensor = self.model(x) if fits else self.other(x)
        return output
