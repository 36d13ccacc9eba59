"""Chains of convolutions in a graph, which compute some rows of each in turn where that pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from torchcram.runtime.cpu import replace_layers
from torchcram.runtime.cpu.chain_plan import NO_RESIDUAL, ChainLayer
from torchcram.runtime.cpu.graph_nodes import module_of, refresh_, sections, shape_of
from torchcram.runtime.cpu.modules import SparseConv2d
from torchcram.runtime.cpu.ops.convolution_chain import ring_floats
from torchcram.runtime.cpu.ops.image_layout import images_innermost
from torchcram.runtime.cpu.packing import NOT_CUT

_ROWS = (1, 2, 4)  # of outputs at a time
_USUAL_ROWS = 2  # mostly the fastest number, for which the chains are cut
_CACHE_BYTES = 9 * 2**20  # limit for the ring buffers of a chain
_MARGIN = 1.03  # a chain may take this many times as long as its layers
_FLOAT_BYTES = 4


class _Convolution(NamedTuple):
    """A node of a chain.

    Attributes:
        node: Node of the graph.
        module: Module that the node calls.
        source: Node whose result it reads.
        residual: Node whose result it adds, or None.
    """

    node: fx.Node
    module: SparseConv2d
    source: fx.Node
    residual: fx.Node | None

    def reads(self) -> list[fx.Node]:
        """Returns the nodes whose results it needs."""
        return [self.source] if self.residual is None else [self.source, self.residual]


class _Chain:
    """Convolutions, of which only the last one has a result that other nodes use.

    Args:
        convolutions: Convolutions in the order of the graph. They read one result of another node.
    """

    def __init__(self, convolutions: list[_Convolution]) -> None:
        self.convolutions = convolutions
        self.nodes = [each.node for each in convolutions]
        (self.source,) = {node for each in convolutions for node in each.reads()} - set(self.nodes)
        values = {self.source: 0, **{node: number for number, node in enumerate(self.nodes, 1)}}
        self.layers = tuple(
            ChainLayer(
                values[each.source],
                NO_RESIDUAL if each.residual is None else values[each.residual],
                each.module.out_channels,
                each.module.relu,
                each.module.geometry,
            )
            for each in convolutions
        )
        self.numbers = [number for layer in self.layers for number in layer.numbers()]

    def bytes_in_memory(self, rows: int) -> int:
        """Returns the number of bytes of the ring buffers of all layers but the last."""
        images, _, height, width = shape_of(self.source)
        return _FLOAT_BYTES * images * sum(ring_floats(self.layers, (height, width), rows))

    def run(self, x: Tensor, rows: int) -> Tensor:
        """Computes some rows of each layer in turn."""
        modules = [each.module for each in self.convolutions]
        packed, biases = [module.packed for module in modules], [module.bias for module in modules]
        y: Tensor = torch.ops.torchcram.convolution_chain(x, packed, biases, self.numbers, rows)
        return y

    def run_layer_by_layer(self, x: Tensor) -> Tensor:
        """Computes all rows of a layer before the next one, as the graph does."""
        values = {self.source: x}
        last_use = {node: each for each in self.convolutions for node in each.reads()}
        for each in self.convolutions:
            values[each.node] = each.module(*(values[node] for node in each.reads()))
            for node in each.reads():
                if last_use[node] is each:
                    values.pop(node, None)
        return values[self.nodes[-1]]


def chain_convolutions_(model: fx.GraphModule) -> None:
    """Replaces convolutions on panels of images by chains, unless these are measured to be slower.

    The layers stay where they are in the model, with their packed weights.

    Args:
        model: Graph, changed in place. Its nodes must have shapes (`torch.fx.passes.shape_prop`).
    """
    # The last chain comes first: replacing one erases its last node, which the next one may read.
    for chain in reversed(list(_possible_chains(model))):
        rows = _fastest_rows(chain)
        if rows is not None:
            _replace_(model, chain, rows)
    refresh_(model)


def _possible_chains(model: fx.GraphModule) -> Iterator[_Chain]:
    """Yields chains that are as long as they can be with their rows in the caches."""
    modules = dict(model.named_modules())
    uses = Counter(node.target for node in model.graph.nodes if node.op == "call_module")
    chain: _Chain | None = None
    for section in sections(model):
        candidates = [_convolution(modules, node) for node in section if uses[node.target] == 1]
        convolutions = [each for each in candidates if each is not None]
        possible = len(convolutions) == len(section)
        if chain is not None and possible:
            longer = _Chain(chain.convolutions + convolutions)
            if longer.bytes_in_memory(_USUAL_ROWS) <= _CACHE_BYTES:
                chain = longer
                continue
        if chain is not None:
            yield chain
        chain = _Chain(convolutions) if possible else None
    if chain is not None:
        yield chain


def _convolution(modules: dict[str, nn.Module], node: fx.Node) -> _Convolution | None:
    """Returns a node as part of a chain, or None if it cannot be one."""
    module = module_of(modules, node)
    if not isinstance(module, SparseConv2d) or not module.by_images or module.tiles != NOT_CUT:
        return None
    source, residual = (*node.args, None)[:2]
    if not isinstance(source, fx.Node) or node.kwargs:
        return None
    if residual is None:
        return _Convolution(node, module, source, None)
    if not isinstance(residual, fx.Node) or shape_of(residual) != shape_of(node):
        return None
    return _Convolution(node, module, source, residual)


def _fastest_rows(chain: _Chain) -> int | None:
    """Returns the number of rows at a time with which a chain is fastest, or None if it is slower.

    A chain needs less memory than its layers do, and other load on the machine may displace its
    rows from the caches while it is measured. So it has to be clearly slower to be refused.
    """
    fitting = [rows for rows in _ROWS if chain.bytes_in_memory(rows) <= _CACHE_BYTES]
    if not fitting or len(chain.nodes) == 1:
        return None
    x = images_innermost(torch.randn(shape_of(chain.source)))
    work: dict[str, Callable[[], object]] = {"layers": partial(chain.run_layer_by_layer, x)}
    work.update({str(rows): partial(chain.run, x, rows) for rows in fitting})
    times = replace_layers.time_in_turns(work)
    best = min(fitting, key=lambda rows: times[str(rows)])
    return best if times[str(best)] < _MARGIN * times["layers"] else None


def _replace_(model: fx.GraphModule, chain: _Chain, rows: int) -> None:
    graph, last = model.graph, chain.nodes[-1]
    with graph.inserting_after(last):
        new = graph.call_function(torch.ops.torchcram.convolution_chain)
    new.meta = dict(last.meta)
    last.replace_all_uses_with(new)
    with graph.inserting_before(new):
        packed = [graph.get_attr(f"{node.target}.packed") for node in chain.nodes]
        biases = [
            None if each.module.bias is None else graph.get_attr(f"{each.node.target}.bias")
            for each in chain.convolutions
        ]
    new.args = (chain.source, packed, biases, chain.numbers, rows)
    for node in reversed(chain.nodes):
        graph.erase_node(node)
