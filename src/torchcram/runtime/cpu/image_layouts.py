"""Images as the innermost dimension in memory, through the layers of a graph that want them so."""

from __future__ import annotations

import torch
from torch import fx, nn

from torchcram.runtime.cpu.graph_nodes import ADD, is_call, module_of, node_activation, refresh_
from torchcram.runtime.cpu.modules import SparseConv2d


def lay_images_innermost_(model: fx.GraphModule) -> None:
    """Keeps images the innermost dimension in memory between layers for panels of images.

    Such a layer returns outputs in the layout of its inputs. Inputs from other nodes are copied to
    that layout, and outputs to other nodes are copied back to their usual memory format.

    Args:
        model: Graph, changed in place. Its nodes must have shapes (`torch.fx.passes.shape_prop`).
    """
    modules = dict(model.named_modules())
    inner: set[fx.Node] = set()
    for node in model.graph.nodes:
        sources = node.all_input_nodes
        if _by_images(modules, node) or (
            sources and inner.issuperset(sources) and _keeps_layout(modules, node)
        ):
            inner.add(node)
    # Nodes share a copy unless a node may write to its input in between.
    written = any(_writes(modules, node) for node in model.graph.nodes)
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(model.graph.nodes):
        inward = _by_images(modules, node)
        if node in inner and not inward:
            continue
        for source in [node.args[0]] if inward else node.all_input_nodes:
            if not isinstance(source, fx.Node) or (source in inner) == inward:
                continue
            if written or source not in copies:
                with model.graph.inserting_before(node):
                    copies[source] = _other_layout(model, source, innermost=inward)
            node.replace_input_with(source, copies[source])
    refresh_(model)


def _other_layout(model: fx.GraphModule, node: fx.Node, *, innermost: bool) -> fx.Node:
    memory_format = getattr(node.meta.get("tensor_meta"), "memory_format", None)
    if innermost or memory_format in (None, torch.contiguous_format):
        return model.graph.call_function(torch.ops.torchcram.lay_out_images, (node, innermost))
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


def _by_images(modules: dict[str, nn.Module], node: fx.Node) -> bool:
    layer = module_of(modules, node)
    return isinstance(layer, SparseConv2d) and layer.by_images


def _keeps_layout(modules: dict[str, nn.Module], node: fx.Node) -> bool:
    """Returns whether the outputs of a node have the memory layout of its inputs."""
    idle = isinstance(module_of(modules, node), (nn.Identity, nn.Dropout))
    return idle or is_call(node, ADD) or node_activation(modules, node) is not None
