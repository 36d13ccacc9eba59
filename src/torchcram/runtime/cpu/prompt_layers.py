"""Norms and gated feed-forward layers of decoders whose rows run in the kernels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

import torchcram.runtime.cpu.ops  # noqa: F401  registers the operators


class RootMeanSquareNorm(nn.Module):
    """Norm of Llama: y = weight * x / sqrt(mean of x^2 + eps).

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
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


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
            product = torch.ops.torchcram.silu_product(gate, up)
        else:
            product = functional.silu(gate) * up
        return cast("Tensor", self.down_proj(product))


def fuse_rows_(decoder: Any) -> None:  # noqa: ANN401
    """Gives the norms and the feed-forward layers of a decoder the kernels.

    Args:
        decoder: Decoder with layers that compute what those of Llama do, changed in place.
    """
    for layer in decoder.layers:
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, _fused(getattr(layer, name)))
        layer.mlp = GatedFeedForward(layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    decoder.norm = _fused(decoder.norm)


def _fused(norm: Any) -> RootMeanSquareNorm:  # noqa: ANN401
    return RootMeanSquareNorm(norm.weight, float(norm.variance_epsilon))
