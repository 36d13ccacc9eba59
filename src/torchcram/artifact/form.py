"""What a tensor is, and in which order its values are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcram.artifact.encoding import Encoding
from torchcram.artifact.integers import wide
from torchcram.layers import LayerWeights, reduction_last


@dataclass(frozen=True, kw_only=True)
class Form:
    """All that is needed to read the parts of a tensor.

    Attributes:
        dtype: of the tensor.
        shape: of the tensor.
        encoding: how it is stored.
        transposed: the groups of a transposed convolution, where the encoding depends on what its
            inputs and outputs are.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: Encoding
    transposed: int | None = None

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
        linear = len(self.shape) == 2 and self.transposed is None
        return linear or not self.encoding.by_rows

    @property
    def rows(self) -> tuple[int, ...]:
        """(groups, outputs, *kernel positions, inputs)."""
        return tuple(by_rows(torch.empty(self.shape, device="meta"), self.transposed).shape)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Views a tensor of the form as its `rows`."""
        return by_rows(tensor, self.transposed)

    def from_rows(self, flat: Tensor) -> Tensor:
        """Returns values in the order of the rows as a tensor of the form."""
        inputs = 2 if self.transposed is None else 1
        return flat.view(self.rows).movedim(-1, inputs).reshape(self.shape).contiguous()


def by_rows(tensor: Tensor, transposed: int | None) -> Tensor:
    """Views a weight as (groups, outputs, *kernel positions, inputs).

    Args:
        tensor: of two dimensions or more.
        transposed: the groups, where it is the weight of a transposed convolution.
    """
    weights = LayerWeights({"": tensor}, {} if transposed is None else {"": transposed})
    return reduction_last(weights, "")
