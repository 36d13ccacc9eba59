"""Layers that stay dense, with the weight in the memory layout that oneDNN computes with.

Linear and Conv2d layers of torch keep their weight row by row, and MKL or oneDNN rearranges it at
every call. Here oneDNN, which is part of torch, rearranges it once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchcram.runtime.cpu.ops.common import register
from torchcram.runtime.cpu.tensor_cache import TensorCache

_layouts: TensorCache[Tensor] = TensorCache()


def _layout_of(weight: Tensor, reorder: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns a weight in the layout of oneDNN, from an earlier call unless it has changed."""

    def compute(weight: Tensor) -> Tensor:
        with torch.no_grad():
            return reorder(weight.detach())

    return _layouts.get(weight, compute)


def _suits(x: Tensor, weight: Tensor, dim: int) -> bool:
    """Returns whether oneDNN can compute with a weight whose changes torch counts.

    Args:
        x: Inputs of the layer.
        weight: Weight (outputs, inputs, ...).
        dim: Dimension of `x` with the inputs.
    """
    if weight.is_inference() or x.numel() == 0 or x.shape[dim] != weight.shape[1]:
        return False
    return x.dtype == weight.dtype == torch.float32


def _run_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if x.dim() < 2 or not _suits(x, weight, -1):
        return functional.linear(x, weight, bias)
    tokens = x.reshape(-1, x.shape[-1])
    layout = _layout_of(
        weight, lambda plain: torch.ops.mkldnn._reorder_linear_weight(plain, len(tokens))
    )
    y: Tensor = torch.ops.mkldnn._linear_pointwise(tokens, layout, bias, "none", [], "")
    return y.view(*x.shape[:-1], len(weight))


def _fake_linear(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


register(
    "reordered_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    _run_linear,
    fake=_fake_linear,
    dense=functional.linear,
)


def _run_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    if x.dim() != 4 or not _suits(x, weight, 1):
        return _dense_conv2d(x, weight, bias, stride, padding, dilation, residual, relu)
    shape = (padding, stride, dilation, 1)
    layout = _layout_of(
        weight,
        lambda plain: torch.ops.mkldnn._reorder_convolution_weight(plain, *shape, list(x.shape)),
    )
    y: Tensor
    if residual is None:
        after = "relu" if relu else "none"
        y = torch.ops.mkldnn._convolution_pointwise(x, layout, bias, *shape, after, [], "")
    else:
        y = torch.ops.mkldnn._convolution_pointwise.binary(
            *(x, residual, layout, bias, *shape, "add", 1.0, "relu" if relu else None, [], None)
        )
    return y


def _dense_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    residual: Tensor | None = None,
    relu: bool = False,
) -> Tensor:
    y = functional.conv2d(x, weight, bias, stride, padding, dilation)
    y = y if residual is None else y + residual
    return functional.relu(y) if relu else y


register(
    "reordered_conv2d(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, "
    "int[] dilation, Tensor? residual=None, bool relu=False) -> Tensor",
    _run_conv2d,
    fake=_dense_conv2d,
    dense=_dense_conv2d,
)


class ReorderedLinear(nn.Linear):
    """A Linear layer whose weight oneDNN rearranges once, at the first call.

    The parameters are those of the given layer, so that a state dict, shared weights and
    derivatives stay as they are. The rearranged copy takes as much memory as the weight.

    Args:
        layer: Layer to compute.
    """

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        self.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  as in torch
        """Maps (..., inputs) to (..., outputs)."""
        y: Tensor = torch.ops.torchcram.reordered_linear(input, self.weight, self.bias)
        return y


class ReorderedConv2d(nn.Conv2d):
    """A convolution without groups whose weight oneDNN rearranges once, like `ReorderedLinear`.

    It can also add a residual and apply ReLU.

    Args:
        layer: Layer to compute, padded with zeros by a number of pixels.
    """

    def __init__(self, layer: nn.Conv2d) -> None:
        geometry: Any = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        channels = (layer.in_channels, layer.out_channels)
        super().__init__(*channels, *geometry, bias=False, device="meta")  # type: ignore[misc]
        self.weight, self.bias = layer.weight, layer.bias
        self.relu = False
        self.train(layer.training)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:  # noqa: A002
        """Maps (images, inputs, rows, columns), or a single image, to the outputs."""
        geometry = (self.stride, self.padding, self.dilation)
        y: Tensor = torch.ops.torchcram.reordered_conv2d(
            input, self.weight, self.bias, *geometry, residual, self.relu
        )
        return y


def reordered(layer: nn.Module) -> nn.Module:
    """Returns a Linear or Conv2d layer whose weight oneDNN rearranges once."""
    if isinstance(layer, nn.Linear):
        return ReorderedLinear(layer)
    assert isinstance(layer, nn.Conv2d)  # noqa: S101
    return ReorderedConv2d(layer)


@functools.cache
def can_reorder() -> bool:
    """Returns whether this build of torch has oneDNN and the operators used here."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            return all(
                torch.allclose(reordered(layer)(x), layer(x), atol=1e-5)
                for layer, x in (
                    (nn.Linear(16, 16), torch.ones(2, 16)),
                    (nn.Conv2d(16, 16, 3, padding=1), torch.ones(2, 16, 4, 4)),
                )
            )
    except (AttributeError, RuntimeError):
        return False
