"""A graph of layers with sparse kernels, fused, in the memory layouts that suit its layers."""

from __future__ import annotations

import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import partial
from typing import TYPE_CHECKING

from torch.fx.passes.shape_prop import ShapeProp

from torchcram.runtime.cpu.chains import chain_convolutions_
from torchcram.runtime.cpu.fuse import fuse_epilogues_, replace_max_pools_
from torchcram.runtime.cpu.image_layouts import choose_by_images, lay_images_innermost_
from torchcram.runtime.cpu.packing import NOT_CUT
from torchcram.runtime.cpu.replace_layers import Inputs, Tiles, layer_inputs, replace_layers_
from torchcram.runtime.cpu.reports import with_report

if TYPE_CHECKING:
    from torch import fx, nn


def prepared_graph_(
    graph: fx.GraphModule,
    example: Inputs,
    *,
    int8: bool,
    sparse: bool = True,
    tiles: Tiles = NOT_CUT,
) -> nn.Module | None:
    """Gives a graph sparse layers, in place, and returns it, or None if it does not run.

    Args:
        graph: Graph of dense layers.
        example: Inputs that kernels are chosen for.
        int8: Whether Linear layers may compute in 8 bits.
        sparse: Whether layers may become sparse.
        tiles: Tiles that convolutions may compute with in place of images.
    """
    try:
        with redirect_stderr(io.StringIO()):  # fx also prints errors
            inputs = layer_inputs(graph, example)
            _annotate_shapes_(graph, example)
            by_images = partial(choose_by_images, graph, tiles=tiles)
            choices = replace_layers_(
                *(graph, inputs),
                int8=int8,
                choose_by_images=by_images,
                sparse=sparse,
                tiles=tiles,
            )
            _annotate_shapes_(graph, example)
            fuse_epilogues_(graph)
            replace_max_pools_(graph)
            lay_images_innermost_(graph, tiles)
            _annotate_shapes_(graph, example)
            chain_convolutions_(graph)
    except Exception:  # noqa: BLE001  the model is then prepared without a graph
        return None
    return with_report(graph.eval(), choices)


def _annotate_shapes_(graph: fx.GraphModule, example: Inputs) -> None:
    """Notes the shape and the memory format of every result in the graph."""
    arguments = example if isinstance(example, tuple) else (example,)
    if isinstance(example, Mapping):
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        defaults = {str(node.target): node.args[0] if node.args else None for node in inputs}
        arguments = tuple({**defaults, **example}.values())
    ShapeProp(graph).propagate(*arguments)
