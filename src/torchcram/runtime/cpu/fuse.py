"""Fusion: sparse layers take over the operations around them.

Models that `torch.fx` can trace are fused as graphs: batch norms are folded into convolutions, and
sparse layers compute the activation and the residual addition that follow them.

Encoders like BERT, as Transformers writes them, are fused module by module. Nothing is imported
from Transformers; the parts are recognised by the names of their children:

    output(h, x) = LayerNorm(dense(h) + x)           with children dense, LayerNorm, dropout
    intermediate(x) = intermediate_act_fn(dense(x))  with children dense, intermediate_act_fn
    self(x) = softmax(query(x) key(x)^T) value(x)    with children query, key, value, dropout
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.utils.fusion import fuse_conv_bn_eval

from torchcram.runtime.cpu.graph_nodes import (
    ADD,
    is_call,
    module_of,
    node_activation,
    only_user,
    refresh_,
)
from torchcram.runtime.cpu.modules import (
    SparseConv2d,
    SparseFeedForward,
    SparseFeedForwardInt8,
    SparseLinear,
    SparseLinearInt8,
)
from torchcram.runtime.cpu.reordered import ReorderedConv2d

if TYPE_CHECKING:
    from collections.abc import Callable


# Graphs


def as_graph(model: nn.Module) -> fx.GraphModule | None:
    """Returns `model` as a graph with folded batch norms, or None if it cannot be traced."""
    try:
        graph = fx.symbolic_trace(model)
    except Exception:  # noqa: BLE001  tracing runs the model on proxies, which may raise anything
        return None
    if any(node.op == "get_attr" and _owner(graph, node) for node in graph.graph.nodes):
        return None  # the model reads the weight of a layer itself
    _fold_batchnorm_(graph)
    return graph


def _owner(model: fx.GraphModule, node: fx.Node) -> bool:
    name = str(node.target).rpartition(".")[0]
    return isinstance(model.get_submodule(name), (nn.Linear, nn.Conv2d))


def _fold_batchnorm_(model: fx.GraphModule) -> None:
    modules = dict(model.named_modules())
    uses = _uses(model)
    for node in list(model.graph.nodes):
        norm = module_of(modules, node)
        before = node.args[0] if node.args else None
        conv = module_of(modules, before)
        if not isinstance(norm, nn.BatchNorm2d) or not isinstance(before, fx.Node):
            continue
        if not isinstance(conv, nn.Conv2d):
            continue
        if norm.training or norm.running_mean is None or len(before.users) > 1:
            continue
        if uses[before.target] > 1 or uses[node.target] > 1:
            continue
        name = str(before.target)
        modules[name] = fuse_conv_bn_eval(conv, norm)
        _replace_(model, name, modules[name])
        node.replace_all_uses_with(before)
        model.graph.erase_node(node)
    refresh_(model)


def fuse_epilogues_(model: fx.GraphModule) -> None:
    """Moves residual additions and activations into the layers before them.

    Args:
        model: Graph, changed in place. Its nodes must have shapes (`torch.fx.passes.shape_prop`).
    """
    modules = dict(model.named_modules())
    uses = _uses(model)
    for node in list(model.graph.nodes):
        layer = module_of(modules, node)
        if uses[node.target] > 1:
            continue
        if isinstance(layer, (SparseConv2d, ReorderedConv2d)):
            _fuse_convolution_(model, modules, node, layer)
        elif isinstance(layer, (SparseLinear, SparseLinearInt8)):
            after = only_user(node)
            activation = node_activation(modules, after)
            if after is not None and activation is not None and layer.activation == "none":
                layer.activation = activation
                _merge_(model, after, node)
    refresh_(model)


def _fuse_convolution_(
    model: fx.GraphModule,
    modules: dict[str, nn.Module],
    node: fx.Node,
    layer: SparseConv2d | ReorderedConv2d,
) -> None:
    after = only_user(node)
    if after is not None and is_call(after, ADD) and len(after.args) == 2 and not after.kwargs:
        other = after.args[1] if after.args[0] is node else after.args[0]
        if isinstance(other, fx.Node) and other is not node and _same_shape(node, other):
            with model.graph.inserting_before(after):
                new = model.graph.call_module(str(node.target), (node.args[0], other))
            new.meta = dict(after.meta)
            after.replace_all_uses_with(new)
            model.graph.erase_node(after)
            model.graph.erase_node(node)
            node, after = new, only_user(new)
    if after is not None and node_activation(modules, after) == "relu":
        layer.relu = True
        _merge_(model, after, node)


class FastMaxPool2d(nn.Module):
    """`nn.MaxPool2d` by a kernel for float32 images in the contiguous memory format.

    Args:
        original: Max pooling without dilation, indices and ceil mode; it runs for other images.
    """

    def __init__(self, original: nn.MaxPool2d) -> None:
        super().__init__()
        self.original = original
        sizes = (original.kernel_size, original.stride, original.padding)
        self.sizes = [[size, size] if isinstance(size, int) else list(size) for size in sizes]

    def forward(self, x: Tensor) -> Tensor:
        """Maps (images, channels, rows, columns) to the maxima of the windows."""
        plain = x.dim() == 4 and x.dtype == torch.float32 and x.is_contiguous() and x.numel() > 0
        if not plain or x.device.type != "cpu":
            other: Tensor = self.original(x)
            return other
        y: Tensor = torch.ops.torchcram.max_pool2d(x, *self.sizes)
        return y


def replace_max_pools_(model: fx.GraphModule) -> None:
    """Gives the max pooling layers of a graph a faster kernel, in place."""
    for name, module in list(model.named_modules()):
        if type(module) is not nn.MaxPool2d or module.ceil_mode or module.return_indices:
            continue
        if module.dilation in (1, (1, 1)):
            _replace_(model, name, FastMaxPool2d(module))


def _same_shape(a: fx.Node, b: fx.Node) -> bool:
    shapes = [getattr(node.meta.get("tensor_meta"), "shape", None) for node in (a, b)]
    return shapes[0] is not None and shapes[0] == shapes[1]


def _merge_(model: fx.GraphModule, after: fx.Node, node: fx.Node) -> None:
    after.replace_all_uses_with(node)
    model.graph.erase_node(after)


def _uses(model: fx.GraphModule) -> Counter[object]:
    return Counter(node.target for node in model.graph.nodes if node.op == "call_module")


def _replace_(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


# Encoders like BERT

_OUTPUT = {"dense", "LayerNorm", "dropout"}
_INTERMEDIATE = {"dense", "intermediate_act_fn"}
_ATTENTION = {"query", "key", "value", "dropout"}
_SIZES = ("num_attention_heads", "attention_head_size")


class ResidualNorm(nn.Module):
    """y = LayerNorm(layer(h) + x).

    Args:
        layer: Layer that takes the residual x as its second argument.
        norm: Layer norm.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, norm

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        """Returns y."""
        y: Tensor = self.norm(self.layer(h, x))
        return y


class SelfAttention(nn.Module):
    """softmax(Q K^T scale) V of all heads at once.

    Args:
        original: Module with the layers of Q, K and V; it runs if there is a mask or a cache.
        heads: Number of heads.
        scale: Factor of the scores Q K^T.
        own_kernel: Whether to run the kernel of torchcram instead of the one of torch.
    """

    def __init__(
        self, original: nn.Module, heads: int, scale: float, *, own_kernel: bool = True
    ) -> None:
        super().__init__()
        self.original, self.heads, self.scale = original, heads, scale
        self.own_kernel = own_kernel

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor | None, ...]:
        """Returns the outputs of all heads, and None for the attention weights."""
        given = any(each is not None and each is not False for each in (*args, *kwargs.values()))
        if given or x.dim() != 3:
            whole: tuple[Tensor | None, ...] = self.original(x, *args, **kwargs)
            return whole
        parts = [getattr(self.original, name)(x) for name in ("query", "key", "value")]
        if self.own_kernel:
            return torch.ops.torchcram.attention(*parts, self.heads, self.scale), None
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        y = functional.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return y.transpose(1, 2).flatten(2), None


def fuse_encoder_(model: nn.Module) -> bool:
    """Fuses the encoder layers that it recognises, in place; returns whether there were any."""
    fused = _fuse_attention_(model)
    for module in list(model.modules()):
        output = _parts(getattr(module, "output", None), _OUTPUT)
        dense = output.get("dense")
        if not isinstance(dense, (SparseLinear, SparseLinearInt8)):
            continue
        between = _parts(getattr(module, "intermediate", None), _INTERMEDIATE)
        first, activation = (
            between.get("dense"),
            _function_activation(between.get("intermediate_act_fn")),
        )
        layer: nn.Module = dense
        if activation is None:
            pass
        elif isinstance(first, SparseLinear) and isinstance(dense, SparseLinear):
            layer = SparseFeedForward(first, dense, activation=activation)
            module.intermediate = nn.Identity()
        elif isinstance(first, SparseLinearInt8) and isinstance(dense, SparseLinearInt8):
            layer = SparseFeedForwardInt8(first, dense, activation=activation)
            module.intermediate = nn.Identity()
        elif isinstance(first, (SparseLinear, SparseLinearInt8)):
            first.activation = activation
            module.intermediate = first
        module.output = ResidualNorm(layer, output["LayerNorm"])
        fused = True
    return fused


def _fuse_attention_(model: nn.Module) -> bool:
    fused = False
    for module in list(model.modules()):
        original = getattr(module, "self", None)
        layers = _parts(original, _ATTENTION)
        heads, size = (getattr(original, name, None) for name in _SIZES)
        if not isinstance(original, nn.Module) or not isinstance(size, int) or size % 16:
            continue
        sparse = any(isinstance(each, (SparseLinear, SparseLinearInt8)) for each in layers.values())
        if sparse and isinstance(heads, int) and not getattr(original, "is_decoder", False):
            module.self = SelfAttention(original, heads, size**-0.5)
            fused = True
    return fused


def _parts(module: object, names: set[str]) -> dict[str, nn.Module]:
    """Returns the children of a module if they have exactly these names, else an empty dict."""
    children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
    return children if children.keys() == names else {}


def _function_activation(function: nn.Module | None) -> str | None:
    """Returns the name of an activation, recognised by its values, or None."""
    if function is None:
        return None
    x = torch.linspace(-6, 6, 101)
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "gelu": functional.gelu,
        "relu": functional.relu,
        "silu": functional.silu,
    }
    for name, candidate in known.items():
        if torch.allclose(function(x.clone()), candidate(x), atol=1e-6):
            return name
    return None
