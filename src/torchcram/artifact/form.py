"""What a tensor is, and in which order its values are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcram.artifact.encoding import Encoding
from torchcram.artifact.integers import wide
from torchcram.layers import LayerWeights, Layout, reduction_last


@dataclass(frozen=True, kw_only=True)
class Form:
    """All that is needed to read the parts of a tensor.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        encoding: how it is stored.
        transposed: the groups of a transposed convolution, where the encoding depends on what its
            inputs and outputs are; 1 for other weights with their inputs before their outputs.
        stacked: Whether dimension 0 is that of fused experts, where the encoding depends on it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: Encoding
    transposed: int | None = None
    stacked: bool = False

    @property
    def numel(self) -> int:
        """How many values the tensor has."""
        return math.prod(self.shape)

    @property
    def computed_in(self) -> torch.dtype:
        """The type in which scales are multiplied; without scales that of the tensor."""
        return self.dtype if self.encoding.bits is None else wide(self.dtype)

    @property
    def in_order(self) -> bool:
        """Whether values are stored in the order in which they lie in memory."""
        linear = len(self.shape) == 2 + self.stacked and self.transposed is None
        return linear or not self.encoding.by_rows

    @property
    def rows(self) -> tuple[int, ...]:
        """(groups, outputs, *kernel positions, inputs)."""
        return tuple(self.to_rows(torch.empty(self.shape, device="meta")).shape)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Views a tensor of the form as its `rows`."""
        return by_rows(tensor, layout(self.transposed, stacked=self.stacked))

    def from_rows(self, flat: Tensor) -> Tensor:
        """Returns values in the order of the rows as a tensor of the form."""
        inputs = 2 if self.transposed is None else 1
        return flat.view(self.rows).movedim(-1, inputs).reshape(self.shape).contiguous()


def layout(transposed: int | None, *, stacked: bool = False) -> Layout:
    """Returns the layout that a form stands for."""
    return Layout(transposed=transposed is not None, groups=transposed or 1, stacked=stacked)


def by_rows(tensor: Tensor, used_as: Layout) -> Tensor:
    """Views a weight as (groups, outputs, *kernel positions, inputs).

    Args:
        tensor: of two dimensions or more.
        used_as: How its layer uses it.
    """
    return reduction_last(LayerWeights({"": tensor}, {"": used_as}), "")
