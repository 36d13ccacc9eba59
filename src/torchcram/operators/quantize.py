"""Symmetric round-to-nearest quantization of weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from torchcram.layers import count_inputs, cut_inputs, local_weights, reduction_last, whole_shape
from torchcram.messages import list_names, warn_caller
from torchcram.operators.base import Operator
from torchcram.sharding import block_maxima

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.sharding import Part
    from torchcram.weights import Weights


@dataclass(frozen=True)
class Quantize(Operator):
    """Rounds weights to the nearest multiple q s of a scale s, |q| <= 2^(bits-1) - 1.

    The scale s is the largest magnitude of its weights divided by 2^(bits-1) - 1. Its weights are
    an output channel, or with `group_size` every `group_size` consecutive weights along the
    reduction dimension. Zero stays zero, so quantizing after pruning keeps the mask. Quantize has
    no mask of its own: the gradient passes straight through.

    Attributes:
        bits: Number of bits, 2 to 8.
        group_size: Number of inputs that share a scale; None for one scale per output channel.
    """

    supports_shards: ClassVar[bool] = True

    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bits, int) or not 2 <= self.bits <= 8:
            raise ValueError(f"Quantize: bits is {self.bits!r}, allowed are 2 to 8")
        size = self.group_size
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ValueError(
                f"Quantize: group_size must be None or a positive integer, got {size!r}"
            )

    @property
    def levels(self) -> int:
        """Largest |q|."""
        return int(2 ** (self.bits - 1)) - 1

    @torch.no_grad()
    def compress_(self, weights: Weights) -> None:
        """Rounds every weight in place; there is no mask."""
        weights = local_weights(weights)
        inputs = {name: count_inputs(weights, name) for name in weights}
        whole = []
        for name, weight in weights.items():
            if not whole_shape(weights, name).numel():
                continue
            size = self.group_size
            if size is not None and inputs[name] % size:
                whole.append(name)
                size = None
            if (part := cut_inputs(weights, name)) is not None:
                weight.copy_(self._round_rows(weight, part, size, inputs[name]))
            else:
                view = reduction_last(weights, name)
                view.copy_(self._round(view, size))
        if whole:
            _warn_whole_channels(self, tuple(whole))

    def _round(self, view: Tensor, group_size: int | None) -> Tensor:
        # (groups, outputs, kernel x inputs), or (..., inputs / group_size, group_size)
        rows = view.flatten(2) if group_size is None else view.unflatten(-1, (-1, group_size))
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        scale = self._scale(rows.abs().amax(-1, keepdim=True))
        return (rows / scale).round_().mul_(scale).reshape(view.shape)

    def _round_rows(
        self, weight: Tensor, part: Part, group_size: int | None, inputs: int
    ) -> Tensor:
        rows = weight.to(torch.promote_types(weight.dtype, torch.float32))  # inputs, outputs, ...
        sizes = rows.abs()
        if group_size is None and rows.dim() > 2:  # one scale for all positions of the kernel
            sizes = sizes.amax(tuple(range(2, rows.dim())), keepdim=True)
        block = inputs if group_size is None else group_size
        scale = self._scale(block_maxima(sizes, part, block))
        scale = scale[torch.arange(part.here.start, part.here.stop, device=scale.device) // block]
        return (rows / scale).round_().mul_(scale)

    def _scale(self, largest: Tensor) -> Tensor:
        # divides by a tensor: for a number CUDA multiplies by its inverse, unlike the CPU
        scale = largest / torch.full_like(largest, self.levels)
        return torch.where(scale == 0, 1, scale)

    def __str__(self) -> str:
        return f"int{self.bits}" + (f":g{self.group_size}" if self.group_size else "")


def quantizer_of(operator: Operator | None) -> Quantize | None:
    """Returns the last quantizer in an operator, or None."""
    parts = () if operator is None else operator.parts
    return next((part for part in reversed(parts) if isinstance(part, Quantize)), None)


@functools.cache
def _warn_whole_channels(operator: Quantize, names: tuple[str, ...]) -> None:
    warn_caller(
        f"{operator} takes one scale per output channel in layers whose input dimension is no "
        f"multiple of {operator.group_size}: {list_names(names)}"
    )
