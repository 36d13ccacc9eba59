"""Layers that run on the sparse CPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchcram.runtime.cpu.memory_format import is_channels_last
from torchcram.runtime.cpu.ops.conv2d import unpack_conv2d
from torchcram.runtime.cpu.ops.linear import ACTIVATIONS, activation_number, unpack_linear
from torchcram.runtime.cpu.packing import (
    NOT_CUT,
    Geometry,
    check_packed,
    owned,
    pack_images,
    pack_int8,
    pack_linear,
)

__all__ = [
    "PackedLayer",
    "SparseConv2d",
    "SparseFeedForward",
    "SparseFeedForwardInt8",
    "SparseLinear",
    "SparseLinearInt8",
]


class PackedLayer(nn.Module):
    """Base class of sparse layers: a packed weight and a bias, both in the state dict."""

    packed: Tensor
    bias: Tensor | None

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("packed", owned(packed))
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.eval()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: object) -> None:
        new = state_dict.get(f"{prefix}packed")
        if isinstance(new, Tensor):
            check_packed(new)
            if new.shape != self.packed.shape:  # another mask has another size
                self.packed = torch.empty_like(new, device="cpu")
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.packed = owned(self.packed)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.packed = owned(self.packed)  # the copy or pickle may come from inference mode

    def _apply(self, *_: object, **__: object) -> nn.Module:
        """Leaves the layer unchanged: the kernels support float32 on the CPU only."""
        return self


class SparseLinear(PackedLayer):
    """y = activation(x W^T + b) + residual with a packed W; activation and residual are optional.

    Args:
        weight: Weight (outputs, inputs) with zeros.
        bias: Bias of the outputs, or None.
        activation: Activation after the layer: none, relu, gelu, gelu_tanh or silu.

    Raises:
        ValueError: If there is no kernel for the activation.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, *, activation: str = "none") -> None:
        activation_number(activation)  # raises for an unknown activation
        super().__init__(pack_linear(weight), bias)
        self.out_features, self.in_features = weight.shape
        self.activation = activation

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        y: Tensor = torch.ops.torchcram.sparse_linear(
            x, self.packed, self.bias, residual, self.out_features, self.activation
        )
        return y

    @property
    def weight(self) -> Tensor:
        """Dense weight; it is unpacked at every access."""
        return unpack_linear(self.packed, self.in_features, self.out_features)

    def extra_repr(self) -> str:
        """Returns the settings of the layer for its `repr`."""
        return f"{self.in_features}, {self.out_features}, activation={self.activation!r}"


class SparseConv2d(PackedLayer):
    """y = relu(conv(x, W) + b + residual) with a packed W; relu and residual are optional.

    Outputs have the same memory format as those of `torch.nn.Conv2d`: channels_last if the inputs
    or the weight are.

    Args:
        weight: Weight (outputs, inputs, rows, columns) with zeros.
        bias: Bias of the outputs, or None.
        geometry: Kernel size, stride, padding and dilation.
        by_images: Whether a panel holds the same pixels of 16 images, for large batches, instead of
            neighbouring pixels of one image.
        relu: Whether ReLU follows the convolution.
        tiles: Numbers of tiles of an image, down and across, if the layer is called with the tiles
            of images in place of images.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        *,
        by_images: bool = False,
        relu: bool = False,
        tiles: tuple[int, int] = NOT_CUT,
    ) -> None:
        super().__init__(pack_images(weight, geometry) if by_images else pack_linear(weight), bias)
        self.out_channels, self.in_channels = weight.shape[:2]
        self.geometry, self.by_images, self.relu = geometry, by_images, relu
        self.tiles = tiles
        self.channels_last = is_channels_last(weight)
        pairs = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
        self._numbers = [number for pair in pairs for number in pair]

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps (images, inputs, rows, columns), or a single image, to the outputs."""
        if x.dim() == 3:
            return self(x[None], None if residual is None else residual[None])[0]  # type: ignore[no-any-return]
        y: Tensor = torch.ops.torchcram.sparse_conv2d(
            x,
            self.packed,
            self.bias,
            residual,
            self.out_channels,
            self._numbers,
            self.by_images,
            self.relu,
            self.channels_last,
            self.tiles,
        )
        return y

    @property
    def weight(self) -> Tensor:
        """Dense weight; it is unpacked at every access."""
        return unpack_conv2d(
            *(self.packed, self.in_channels, self.out_channels, self._numbers),
            by_images=self.by_images,
        )

    def extra_repr(self) -> str:
        """Returns the settings of the layer for its `repr`."""
        numbers = f"{self.in_channels}, {self.out_channels}, {self.geometry}"
        tiles = "" if self.tiles == NOT_CUT else f", tiles={self.tiles}"
        return f"{numbers}, by_images={self.by_images}, relu={self.relu}{tiles}"


class SparseFeedForward(nn.Module):
    """y = second(activation(first(x))) + residual, with intermediate results kept in the caches.

    Args:
        first: First sparse layer.
        second: Second sparse layer.
        activation: Activation between the layers.

    Raises:
        ValueError: If the layers do not fit together, or there is no kernel for the activation.
    """

    def __init__(self, first: SparseLinear, second: SparseLinear, *, activation: str) -> None:
        super().__init__()
        if first.out_features != second.in_features or activation not in ACTIVATIONS:
            raise ValueError(f"{first} cannot be followed by {activation!r} and {second}")
        self.first, self.second, self.activation = first, second, activation
        self.eval()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        y: Tensor = torch.ops.torchcram.sparse_feed_forward(
            x,
            self.first.packed,
            self.first.bias,
            self.activation,
            self.second.packed,
            self.second.bias,
            residual,
            self.second.out_features,
            self.first.out_features,
        )
        return y


class SparseLinearInt8(PackedLayer):
    """y = activation(x W^T + b) + residual with W and x in 8 bits, scaled per output and per token.

    Sums are exact. Errors come only from rounding x, and W unless it has 8 bits already.

    Args:
        weight: Weight (outputs, inputs) with zeros.
        bias: Bias of the outputs, or None.
        activation: Activation after the layer: none, relu, gelu, gelu_tanh or silu.

    Raises:
        ValueError: If there is no kernel for the activation.
    """

    start: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, bias: Tensor | None, *, activation: str = "none") -> None:
        activation_number(activation)  # raises for an unknown activation
        weight = weight.detach().float()
        scales = weight.abs().amax(1) / 127
        whole = torch.round(weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None])
        whole = whole.to(torch.int8)
        super().__init__(pack_int8(whole), bias)
        # Activations have zero point 128, which adds 128 times the sum of a row.
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
        """Checks the number of input features.

        The kernel cannot: the columns of the packed matrix are padded to a multiple of four.

        Raises:
            ValueError: If the inputs have another number of features than the layer.
        """
        if x.dim() and x.shape[-1] != self.in_features:
            raise ValueError(
                f"the packed matrix does not map {x.shape[-1]} features to {self.out_features}, "
                f"but {self.in_features}"
            )

    @property
    def weight(self) -> Tensor:
        """Dense weight after rounding; it is unpacked at every access."""
        columns: Tensor = torch.ops.torchcram.sparse_linear_int8(
            *(torch.eye(self.in_features), self.packed, self.start, self.scales),
            *(None, None, self.out_features, "none"),
        )
        return columns.t().contiguous()

    def extra_repr(self) -> str:
        """Returns the settings of the layer for its `repr`."""
        return f"{self.in_features}, {self.out_features}, activation={self.activation!r}"


class SparseFeedForwardInt8(nn.Module):
    """y = second(activation(first(x))) + residual, with intermediate results kept in the caches.

    Args:
        first: First sparse layer in 8 bits.
        second: Second sparse layer in 8 bits.
        activation: Activation between the layers.

    Raises:
        ValueError: If the layers do not fit together, or there is no kernel for the activation.
    """

    def __init__(
        self, first: SparseLinearInt8, second: SparseLinearInt8, *, activation: str
    ) -> None:
        super().__init__()
        if first.out_features != second.in_features or activation not in ACTIVATIONS:
            raise ValueError(f"{first} cannot be followed by {activation!r} and {second}")
        self.first, self.second, self.activation = first, second, activation
        self.eval()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        first, second = self.first, self.second
        first.require_features(x)
        y: Tensor = torch.ops.torchcram.sparse_feed_forward_int8(
            x,
            first.packed,
            first.start,
            first.scales,
            first.bias,
            second.packed,
            second.start,
            second.scales,
            second.bias,
            residual,
            second.out_features,
            self.activation,
        )
        return y
