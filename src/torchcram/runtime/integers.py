"""The integers and scales behind weights that were quantized."""

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

    from torchcram.operators import Operator
    from torchcram.weights import LayerWeights


class Integers(NamedTuple):
    """w = q s in float32, bit for bit (but for the sign of zero).

    Attributes:
        values: q in int8, of the shape of w.
        scale: s. One value per index of `axis`; or, where there is a `block`, of the shape of w
            with the `axis` shorter by that factor.
        axis: of w, the one along which s changes.
        block: how many neighbours along `axis` share a scale; 0 where `scale` has one dimension.
    """

    values: Tensor
    scale: Tensor
    axis: int
    block: int

    def transposed(self) -> Integers:
        """Returns the integers of a matrix for its transpose."""
        scale = self.scale.t() if self.block else self.scale
        return Integers(self.values.t(), scale, 1 - self.axis, self.block)

    def in_a_batch(self) -> Integers:
        """Returns them with a first dimension of 1 before the others."""
        scale = self.scale.unsqueeze(0) if self.block else self.scale
        return Integers(self.values.unsqueeze(0), scale, 1 + self.axis, self.block)


def quantizer_of(operator: Operator | None) -> Quantize | None:
    """Returns the quantizer that an operator ends with or contains; the last one counts."""
    parts = () if operator is None else operator.parts
    return next((part for part in reversed(parts) if isinstance(part, Quantize)), None)


@torch.no_grad()
def find_quantizer(weights: LayerWeights, name: str) -> Quantize | None:
    """Returns the quantizer whose integers and scales a weight consists of, as seen from it.

    None where there is none, or where integers of 4 or 8 bits with their scales take more room than
    the weight itself: rows of a single value, for one, are always those of a quantizer.

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
    """Returns how many bits an integer takes in a file: ONNX Runtime reads 4 and 8."""
    return 4 if bits == 4 else 8


@torch.no_grad()
def find_integers(weights: LayerWeights, name: str, quantize: Quantize) -> Integers:
    """Finds q and s of a weight that `quantize` made.

    Args:
        weights: all weights.
        name: of the one to look at; float32.
        quantize: the operator.

    Raises:
        ValueError: naming the weight, if no scales give back exactly its values.
    """
    weight = weights[name]
    if weight.dtype != torch.float32:
        raise ValueError(f"{name!r} is {weight.dtype}: integers are found for torch.float32")
    view = reduction_last(weights, name)  # (groups, outputs, *kernel, inputs)
    inputs = count_inputs(weights, name)
    size = quantize.group_size
    if size is not None and inputs % size:  # as the operator does
        size = None
    rows = view.flatten(2) if size is None else view.unflatten(-1, (-1, size))
    fitted = fit(rows.reshape(-1, rows.shape[-1]), quantize.bits)
    if fitted is None:
        raise ValueError(
            f"{name!r} is not what {quantize} makes of a float32 weight: no scales of that many "
            "bits give back its values"
        )
    codes, scale = fitted[0], fitted[1].view(*rows.shape[:-1], 1)
    whole = torch.where(codes < -quantize.levels, 0, codes)  # what stands for -0.0
    values = torch.empty_like(weight, dtype=torch.int8)
    reduction_last(weights, name, values).copy_(whole.reshape(view.shape))
    layout = layout_of(weights, name)
    axis = layout.stacked + (not layout.transposed)  # of the inputs
    if size is not None:
        # (groups, outputs, *kernel, blocks) to the order of the weight, blocks for inputs
        blocks = scale.squeeze(-1).movedim(-1, 2 - layout.transposed)
        return Integers(values, blocks if layout.stacked else blocks.flatten(0, 1), axis, size)
    if layout.stacked:
        return Integers(values, scale.squeeze(-1).unsqueeze(axis), axis, inputs)
    if view.shape[0] == 1:
        return Integers(values, scale.flatten(), 1 - axis, 0)
    kernel = weight.shape[2:]
    each = scale.view(*scale.shape[:2], *[1] * len(kernel)).expand(*scale.shape[:2], *kernel)
    return Integers(values, each, axis, inputs)
