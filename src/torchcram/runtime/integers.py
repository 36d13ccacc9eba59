"""The integers and scales of quantized weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from torchcram.artifact import integers as artifact_integers
from torchcram.artifact.encoder_search import SIZES
from torchcram.artifact.integers import fit
from torchcram.layers import count_inputs, layout_of, reduction_last
from torchcram.operators import Quantize

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.weights import LayerWeights


class Integers(NamedTuple):
    """w = q s in float32, bit for bit except for the sign of zero.

    Attributes:
        values: Integers q as int8, in the shape of w.
        scale: Scales s. With a `block` they have the shape of w with `axis` divided by the block,
            otherwise one value per index of `axis`.
        axis: Dimension of w along which s changes.
        block: Number of neighbours along `axis` that share a scale; 0 if `scale` has one dimension.
    """

    values: Tensor
    scale: Tensor
    axis: int
    block: int

    def transposed(self) -> Integers:
        """Returns the integers of the transposed matrix."""
        scale = self.scale.t() if self.block else self.scale
        return Integers(self.values.t(), scale, 1 - self.axis, self.block)

    def in_a_batch(self) -> Integers:
        """Returns the integers with an additional first dimension of 1."""
        scale = self.scale.unsqueeze(0) if self.block else self.scale
        return Integers(self.values.unsqueeze(0), scale, 1 + self.axis, self.block)


@torch.no_grad()
def find_quantizer(weights: LayerWeights, name: str) -> Quantize | None:
    """Returns the quantizer that a weight was made by, recognised from its values, or None.

    It also returns None if integers of 4 or 8 bits and their scales would be larger than the weight
    itself: rows of a single value, for example, always look quantized.

    Args:
        weights: All weights.
        name: Name of the weight to look at; float32.
    """
    view = reduction_last(weights, name)
    fitted = artifact_integers.find_integers(view.contiguous(), list(SIZES))
    if fitted is None:
        return None
    size = view.numel() * stored_bits(fitted.bits) // 8 + 4 * fitted.scales.numel()
    return Quantize(fitted.bits, fitted.group_size) if size < 4 * view.numel() else None


def stored_bits(bits: int) -> int:
    """Returns the number of bits that an integer takes in a file; ONNX Runtime reads 4 and 8."""
    return 4 if bits == 4 else 8


@torch.no_grad()
def find_integers(weights: LayerWeights, name: str, quantize: Quantize) -> Integers:
    """Returns the integers and scales of a weight that `quantize` made.

    Args:
        weights: All weights.
        name: Name of the weight to look at; float32.
        quantize: Quantizer that made the weight.

    Raises:
        ValueError: If no scales reproduce the values of the weight exactly.
    """
    weight = weights[name]
    if weight.dtype != torch.float32:
        raise ValueError(f"{name!r} is {weight.dtype}: a quantized weight must be torch.float32")
    view = reduction_last(weights, name)  # (groups, outputs, *kernel, inputs)
    inputs = count_inputs(weights, name)
    size = quantize.group_size
    if size is not None and inputs % size:  # as the operator does
        size = None
    rows = view.flatten(2) if size is None else view.unflatten(-1, (-1, size))
    fitted = fit(rows.reshape(-1, rows.shape[-1]), quantize.bits)
    if fitted is None:
        raise ValueError(
            f"{name!r} is not what {quantize} makes of a float32 weight: no scales reproduce its "
            "values with that many bits"
        )
    codes, scale = fitted[0], fitted[1].view(*rows.shape[:-1], 1)
    whole = torch.where(codes < -quantize.levels, 0, codes)  # the code of -0.0
    values = torch.empty_like(weight, dtype=torch.int8)
    reduction_last(weights, name, values).copy_(whole.reshape(view.shape))
    layout = layout_of(weights, name)
    axis = layout.stacked + (not layout.transposed)  # dimension of the inputs
    if size is not None:
        # (groups, outputs, *kernel, blocks) in the order of the weight, with blocks for inputs
        blocks = scale.squeeze(-1).movedim(-1, 2 - layout.transposed)
        return Integers(values, blocks if layout.stacked else blocks.flatten(0, 1), axis, size)
    if layout.stacked:
        return Integers(values, scale.squeeze(-1).unsqueeze(axis), axis, inputs)
    if view.shape[0] == 1:
        return Integers(values, scale.flatten(), 1 - axis, 0)
    kernel = weight.shape[2:]
    each = scale.view(*scale.shape[:2], *[1] * len(kernel)).expand(*scale.shape[:2], *kernel)
    return Integers(values, each, axis, inputs)
