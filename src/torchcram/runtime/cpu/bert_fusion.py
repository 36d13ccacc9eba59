"""Encoders in the manner of BERT, as Transformers writes them, with more in each operator.

Nothing is imported from there; the parts are recognised by their names and what they hold:

    output(h, x) = LayerNorm(dense(h) + x)          with children dense, LayerNorm, dropout
    intermediate(x) = intermediate_act_fn(dense(x))  with children dense, intermediate_act_fn
    self(x) = softmax(query(x) key(x)^T) value(x)    with children query, key, value, dropout
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchcram.runtime.cpu.modules import (
    SparseFeedForward,
    SparseFeedForwardInt8,
    SparseLinear,
    SparseLinearInt8,
)

if TYPE_CHECKING:
    from collections.abc import Callable

_OUTPUT = {"dense", "LayerNorm", "dropout"}
_INTERMEDIATE = {"dense", "intermediate_act_fn"}
_ATTENTION = {"query", "key", "value", "dropout"}
_SIZES = ("num_attention_heads", "attention_head_size")


class ResidualNorm(nn.Module):
    """y = LayerNorm(layer(h) + x).

    Args:
        layer: takes what is to be added as its second argument.
        norm: the layer norm.
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
        original: what does it where there is a mask or a cache.
        heads: how many.
        scale: of the products.
    """

    def __init__(self, original: nn.Module, heads: int, scale: float) -> None:
        super().__init__()
        self.original, self.heads, self.scale = original, heads, scale

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> tuple[Tensor | None, ...]:
        """Returns the outputs of all heads, and no weights."""
        given = any(each is not None and each is not False for each in (*args, *kwargs.values()))
        if given or x.dim() != 3:
            whole: tuple[Tensor | None, ...] = self.original(x, *args, **kwargs)
            return whole
        parts = [getattr(self.original, name)(x) for name in ("query", "key", "value")]
        return torch.ops.torchcram.attention(*parts, self.heads, self.scale), None


def fuse_encoder_(model: nn.Module) -> bool:
    """Fuses what it recognises, in place; returns whether there was anything."""
    found = _fuse_attention_(model)
    for module in list(model.modules()):
        output = _parts(getattr(module, "output", None), _OUTPUT)
        dense = output.get("dense")
        if not isinstance(dense, (SparseLinear, SparseLinearInt8)):
            continue
        between = _parts(getattr(module, "intermediate", None), _INTERMEDIATE)
        first, activation = between.get("dense"), _activation(between.get("intermediate_act_fn"))
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
        found = True
    return found


def _fuse_attention_(model: nn.Module) -> bool:
    found = False
    for module in list(model.modules()):
        original = getattr(module, "self", None)
        layers = _parts(original, _ATTENTION)
        heads, size = (getattr(original, name, None) for name in _SIZES)
        if not isinstance(original, nn.Module) or not isinstance(size, int) or size % 16:
            continue
        sparse = any(isinstance(each, (SparseLinear, SparseLinearInt8)) for each in layers.values())
        if sparse and isinstance(heads, int) and not getattr(original, "is_decoder", False):
            module.self = SelfAttention(original, heads, size**-0.5)
            found = True
    return found


def _parts(module: object, names: set[str]) -> dict[str, nn.Module]:
    """Returns the children of a module if they have these names, else none."""
    children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
    return children if children.keys() == names else {}


def _activation(function: nn.Module | None) -> str | None:
    """Returns the name of an activation, recognised by what it does."""
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
