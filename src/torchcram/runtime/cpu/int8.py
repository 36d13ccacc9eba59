"""Sparse Linear layers in 8 bits: weights when they are packed, activations as they come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchcram.runtime.cpu import ops
from torchcram.runtime.cpu.modules import PackedLayer
from torchcram.runtime.cpu.packing import pack_int8


class SparseLinearInt8(PackedLayer):
    """y = activation(x W^T + b) + residual; W in 8 bits per output, x in 8 bits per token.

    Sums are exact; what is lost is the rounding of W (none where it has 8 bits already) and of x.

    Args:
        weight: (outputs, inputs), with zeros.
        bias: of the outputs, if any.
        activation: what follows: none, relu, gelu, gelu_tanh or silu.

    Raises:
        ValueError: if the activation is another one.
    """

    start: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, *, activation: str = "none") -> None:
        ops.activation_number(activation)  # refuses another one
        weight = weight.detach().float()
        scales = weight.abs().amax(1) / 127
        whole = torch.round(weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
        whole = whole.to(torch.int8)
        super().__init__(pack_int8(whole), bias)
        # Activations are stored plus 128, which adds 128 times the sum of a row.
        self.register_buffer("start", -128 * whole.sum(1, dtype=torch.int32))
        self.register_buffer("scales", scales)
        self.out_features, self.in_features = weight.shape
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        self.require_features(x)
        y: Tensor = torch.ops.torchcram.sparse_linear_int8(
            x,
            self.packed,
            self.start,
            self.scales,
            self.bias,
            residual,
            self.out_features,
            self.activation,
        )
        return y

    def require_features(self, x: Tensor) -> None:
        """Makes sure that inputs are those of the layer.

        The packed matrix has its columns by fours, and takes up to three too many for zeros.

        Raises:
            ValueError: if they have another number of features.
        """
        if x.dim() and x.shape[-1] != self.in_features:
            raise ValueError(
                f"the packed matrix does not map {x.shape[-1]} features to {self.out_features}, "
                f"but {self.in_features}"
            )

    @property
    def weight(self) -> Tensor:
        """The dense weight as it was rounded, unpacked anew each time."""
        columns: Tensor = torch.ops.torchcram.sparse_linear_int8(
            *(torch.eye(self.in_features), self.packed, self.start, self.scales),
            *(None, None, self.out_features, "none"),
        )
        return columns.t().contiguous()

    def extra_repr(self) -> str:
        """Returns what distinguishes it from other layers."""
        return f"{self.in_features}, {self.out_features}, activation={self.activation!r}"


class SparseFeedForwardInt8(nn.Module):
    """y = second(activation(first(x))) + residual, without a trip to memory in between.

    Args:
        first: a sparse layer in 8 bits.
        second: the next.
        activation: between them.

    Raises:
        ValueError: if they do not fit together.
    """

    def __init__(
        self, first: SparseLinearInt8, second: SparseLinearInt8, *, activation: str
    ) -> None:
        super().__init__()
        if first.out_features != second.in_features or activation not in ops.ACTIVATIONS:
            raise ValueError(f"{first} and {second} do not follow one another with {activation!r}")
        self.first, self.second, self.activation = first, second, activation
        self.eval()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        one, two = self.first, self.second
        one.require_features(x)
        y: Tensor = torch.ops.torchcram.sparse_feed_forward_int8(
            x,
            one.packed,
            one.start,
            one.scales,
            one.bias,
            two.packed,
            two.start,
            two.scales,
            two.bias,
            residual,
            two.out_features,
            self.activation,
        )
        return y
