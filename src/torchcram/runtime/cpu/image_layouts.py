"""Images as the innermost dimension in memory, through the layers of a graph that want them so.

In place of images, these layers may compute with the tiles that images are cut into.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from functools import partial

import torch
from torch import fx, nn

from torchcram.runtime.cpu import replace_layers
from torchcram.runtime.cpu.graph_nodes import (
    ADD,
    is_call,
    module_of,
    node_activation,
    refresh_,
    shape_of,
)
from torchcram.runtime.cpu.modules import SparseConv2d
from torchcram.runtime.cpu.ops.image_layout import images_innermost
from torchcram.runtime.cpu.packing import NOT_CUT
from torchcram.runtime.cpu.replace_layers import LayerTimes, Tiles


def choose_by_images(
    model: fx.GraphModule, times: Mapping[str, LayerTimes], tiles: Tiles = NOT_CUT
) -> set[str]:
    """Returns the names of the convolutions of a graph that are to run on panels of images.

    A layer that is fastest for itself may not be so in a graph: images are copied between it and
    neighbours that run otherwise. One layer after another is changed until the sum of all times,
    copies included, gets no less, from three starts: what is fastest for each layer, no panels of
    images, and panels of images wherever they are possible.

    Args:
        model: Graph of dense layers. Its nodes must have shapes (`torch.fx.passes.shape_prop`).
        times: Milliseconds of each way to run a layer, by the name of the layer.
        tiles: Tiles that these layers compute with in place of images.
    """
    possible = [name for name, ways in times.items() if "by_images" in ways]
    if not possible:
        return set()
    others = {
        name: min(ms for way, ms in times[name].items() if way != "by_images") for name in possible
    }
    modules = dict(model.named_modules())
    of_value = _copy_ms_of_value(model, tiles)

    def cost(chosen: set[str]) -> float:
        layers = sum(times[n]["by_images"] if n in chosen else others[n] for n in possible)
        copied = {(source, inward) for _, source, inward in _copies(model, modules, chosen, tiles)}
        return layers + of_value * sum(_values(source) for source, _ in copied)

    def improve(chosen: set[str]) -> set[str]:
        least, changed = cost(chosen), True
        while changed:
            changed = False
            for name in possible:
                other = chosen ^ {name}
                if (ms := cost(other)) < least:
                    chosen, least, changed = other, ms, True
        return chosen

    fastest = {name for name in possible if times[name]["by_images"] < others[name]}
    return min((improve(start) for start in (fastest, set(), set(possible))), key=cost)


def _copy_ms_of_value(model: fx.GraphModule, tiles: Tiles = NOT_CUT) -> float:
    """Returns the milliseconds that a copy to the other layout takes for each value of a batch."""
    images = [node for node in model.graph.nodes if len(shape_of(node)) == 4]
    images = [node for node in images if _can_be_cut(node, tiles)]
    largest = max(images, key=_values)
    x = torch.randn(shape_of(largest))
    with torch.no_grad():
        times = replace_layers.time_in_turns({"copy": partial(images_innermost, x, tiles)})
    return times["copy"] / max(x.numel(), 1)


def _can_be_cut(node: fx.Node, tiles: Tiles) -> bool:
    return not any(size % count for size, count in zip(shape_of(node)[2:], tiles, strict=True))


def _values(node: fx.Node) -> int:
    return math.prod(shape_of(node))


def lay_images_innermost_(model: fx.GraphModule, tiles: Tiles = NOT_CUT) -> None:
    """Keeps images the innermost dimension in memory between layers for panels of images.

    Such a layer returns outputs in the layout of its inputs. Inputs from other nodes are copied to
    that layout, and outputs to other nodes are copied back to their usual memory format.

    Args:
        model: Graph, changed in place. Its nodes must have shapes (`torch.fx.passes.shape_prop`).
        tiles: Tiles that these layers compute with in place of images.
    """
    modules = dict(model.named_modules())
    by_images = {
        name
        for name, layer in modules.items()
        if isinstance(layer, SparseConv2d) and layer.by_images
    }
    for name in by_images:
        modules[name].tiles = tiles
    # Nodes share a copy unless a node may write to its input in between.
    written = any(_writes(modules, node) for node in model.graph.nodes)
    made: dict[fx.Node, fx.Node] = {}
    for node, source, inward in list(_copies(model, modules, by_images, tiles)):
        if written or source not in made:
            with model.graph.inserting_before(node):
                made[source] = _other_layout(model, source, innermost=inward, tiles=tiles)
        node.replace_input_with(source, made[source])
    refresh_(model)


def _copies(
    model: fx.GraphModule, modules: dict[str, nn.Module], by_images: Set[str], tiles: Tiles
) -> Iterator[tuple[fx.Node, fx.Node, bool]]:
    """Yields the inputs of nodes that have to be copied to another layout.

    Args:
        model: Graph.
        modules: Modules of the graph, by name.
        by_images: Names of the convolutions that run on panels of images.
        tiles: Tiles that these layers compute with in place of images.

    Yields:
        The node, its input, and whether images become the innermost dimension.
    """
    inner: set[fx.Node] = set()  # nodes whose results have images as the innermost dimension
    for node in model.graph.nodes:
        sources = node.all_input_nodes
        if (node.op == "call_module" and node.target in by_images) or (
            sources
            and inner.issuperset(sources)
            and _keeps_layout(modules, node)
            and (tiles == NOT_CUT or len(set(map(shape_of, sources))) == 1)
        ):
            inner.add(node)
    for node in model.graph.nodes:
        inward = node.op == "call_module" and node.target in by_images
        if node in inner and not inward:
            continue
        for source in node.all_input_nodes:
            if (source in inner) != inward and (not inward or _is_in_layout(node, source)):
                yield node, source, inward


def _is_in_layout(node: fx.Node, source: fx.Node) -> bool:
    """Returns whether an input of a convolution is read in the layout of its outputs.

    A residual of another shape is expanded by the layer itself.
    """
    return source is node.args[0] or shape_of(source) == shape_of(node)


def _other_layout(
    model: fx.GraphModule, node: fx.Node, *, innermost: bool, tiles: Tiles
) -> fx.Node:
    memory_format = getattr(node.meta.get("tensor_meta"), "memory_format", None)
    contiguous = memory_format in (None, torch.contiguous_format)
    if innermost or tiles != NOT_CUT or contiguous:
        arguments = (node, innermost, tiles)
        node = model.graph.call_function(torch.ops.torchcram.lay_out_images, arguments)
    if innermost or contiguous:
        return node
    options = {"memory_format": memory_format}
    return model.graph.call_method("contiguous", (node,), options)


def _writes(modules: dict[str, nn.Module], node: fx.Node) -> bool:
    """Returns whether a node may change one of its inputs."""
    module = module_of(modules, node)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") or name in ("iadd", "isub", "imul", "itruediv", "setitem")
    in_place = in_place and node.op in ("call_function", "call_method")
    flags = (getattr(module, "inplace", False), node.kwargs.get("inplace", False))
    return in_place or any(flags) or "out" in node.kwargs


def _keeps_layout(modules: dict[str, nn.Module], node: fx.Node) -> bool:
    """Returns whether the outputs of a node have the memory layout of its inputs."""
    idle = isinstance(module_of(modules, node), (nn.Identity, nn.Dropout))
    return idle or is_call(node, ADD) or node_activation(modules, node) is not None
