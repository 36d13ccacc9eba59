"""RMSNorm and gated feed-forward layers of decoders, which run in kernels for prompts."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import torchcram.runtime.cpu.ops  # noqa: F401  registers the operators

# names of the parts of a layer of Llama in Transformers
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm")


def linear_layers(decoder: Any) -> list[tuple[str, nn.Linear]]:  # noqa: ANN401
    """Returns the Linear layers of a decoder with their names, in the order of the kernels."""
    return [
        (f"layers.{number}.{part}.{name}", getattr(getattr(layer, part), name))
        for number, layer in enumerate(decoder.layers)
        for part, names in (("self_attn", ATTENTION), ("mlp", FEED_FORWARD))
        for name in names
    ]


class FusedRMSNorm(nn.Module):
    """RMSNorm of Llama: y = weight * x / sqrt(mean of x^2 + eps).

    Args:
        weight: Weight, one value per feature.
        eps: Number that is added to the mean.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        self.variance_epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., features) to the same shape."""
        if x.dtype == torch.float32 and self.weight.dtype == torch.float32:
            y: Tensor = torch.ops.torchcram.rms_norm(x, self.weight, self.variance_epsilon)
            return y
        return functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon)


class GatedFeedForward(nn.Module):
    """Feed-forward layers of Llama: y = down(silu(gate(x)) * up(x)).

    Args:
        gate_proj: Layer whose outputs go through the activation.
        up_proj: Layer whose outputs are multiplied by them.
        down_proj: Layer of the products.
    """

    def __init__(self, gate_proj: nn.Module, up_proj: nn.Module, down_proj: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = gate_proj, up_proj, down_proj

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., features) to the same shape."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        if gate.dtype == torch.float32 and up.dtype == torch.float32:
            product = torch.ops.torchcram.silu_and_mul(gate, up)
        else:
            product = functional.silu(gate) * up
        return cast("Tensor", self.down_proj(product))


def fuse_prompt_layers_(decoder: Any) -> None:  # noqa: ANN401
    """Gives the norms and the feed-forward layers of a decoder the kernels.

    Args:
        decoder: Decoder with layers that compute what those of Llama do, changed in place.
    """
    for layer in decoder.layers:
        for name in NORMS:
            setattr(layer, name, _fused(getattr(layer, name)))
        layer.mlp = GatedFeedForward(layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    decoder.norm = _fused(decoder.norm)


def _fused(norm: Any) -> FusedRMSNorm:  # noqa: ANN401
    return FusedRMSNorm(norm.weight, float(norm.variance_epsilon))
