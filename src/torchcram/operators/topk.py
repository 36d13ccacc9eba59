"""Magnitude pruning: keep the largest weights of the model, of each layer or of each output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, ClassVar

import torch

from torchcram.layers import (
    cut_inputs,
    local_weights,
    reduction_last,
    split_layers,
    whole_shape,
)
from torchcram.operators.base import Sparsifier
from torchcram.selection import (
    count_kept,
    keep_largest,
    keep_largest_,
    keep_largest_each,
    keep_largest_in_rows,
    shards_of,
)

if TYPE_CHECKING:
    from torch import Tensor
    from typing_extensions import Self

    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class _TopK(Sparsifier):
    """Base class of magnitude pruning, with one sparsity or a range of sparsities to train over.

    Attributes:
        sparsity: Fraction of weights to zero, in [0, 1); or (low, high), a range to train over.
    """

    supports_shards: ClassVar[bool] = True

    sparsity: float | tuple[float, float]

    def __post_init__(self) -> None:
        if isinstance(self.sparsity, (tuple, list)):
            low, high = (_checked(self, level) for level in _pair(self, self.sparsity))
            if not low < high:
                raise ValueError(f"{type(self).__name__}: the range {low}-{high} is empty")
            object.__setattr__(self, "sparsity", (low, high))
        else:
            object.__setattr__(self, "sparsity", _checked(self, self.sparsity))

    @property
    def is_range(self) -> bool:
        """Whether every step draws a sparsity."""
        return isinstance(self.sparsity, tuple)

    def draw(self, generator: torch.Generator) -> Self:
        """Draws a sparsity uniformly from the range; without a range returns itself."""
        if not isinstance(self.sparsity, tuple):
            return self
        low, high = self.sparsity
        at = torch.rand((), generator=generator, dtype=torch.float64).item()
        return replace(self, sparsity=low + (high - low) * at)

    @property
    def level(self) -> float:
        """Sparsity, if it is not a range."""
        if isinstance(self.sparsity, tuple):
            raise ValueError(
                f"{self} is a range to train over; to compress, give one sparsity or draw() one"
            )
        return self.sparsity

    def _text(self, kind: str) -> str:
        levels = self.sparsity if isinstance(self.sparsity, tuple) else (self.sparsity,)
        return f"{kind}:{'-'.join(map(_decimal, levels))}"


@dataclass(frozen=True)
class GlobalTopK(_TopK):
    """Keeps the n - round(sparsity n) largest of all n weights together, exactly.

    Ties are broken by position, so that the achieved sparsity is the requested one, also in
    bfloat16.
    """

    def select(self, scores: Weights) -> Masks:
        """Keeps the largest scores of all layers together."""
        scores = local_weights(scores)
        masks = keep_largest(list(scores.values()), self._count(scores), shards=shards_of(scores))
        return dict(zip(scores, masks, strict=True))

    @torch.no_grad()
    def compress_(self, weights: Weights) -> Masks:
        """Keeps the largest weights of all layers together, and zeroes the others."""
        weights = local_weights(weights)
        selects_otherwise = type(self).select is not GlobalTopK.select  # in a subclass
        if selects_otherwise or shards_of(weights) is not None:
            return super().compress_(weights)
        masks = keep_largest_(list(weights.values()), self._count(weights))
        return dict(zip(weights, masks, strict=True))

    def _count(self, weights: Weights) -> int:
        """Returns the number of weights to keep."""
        return count_kept(sum(whole_shape(weights, name).numel() for name in weights), self.level)

    def __str__(self) -> str:
        return self._text("global")


@dataclass(frozen=True)
class UniformTopK(_TopK):
    """Keeps the n - round(sparsity n) largest of the n weights of each layer, exactly.

    The q, k and v of attention and the experts of a mixture are layers of their own, whether they
    share a weight or not. The gates of a recurrent layer are not: its input weights are one layer,
    its recurrent weights another.
    """

    def select(self, scores: Weights) -> Masks:
        """Keeps the largest scores of every layer."""
        scores = local_weights(scores)
        names, tensors, keep = [], [], []
        for name in scores:
            layers = split_layers(scores, name)
            names += [name] * len(layers)
            tensors += layers
            size = whole_shape(scores, name).numel() // len(layers)
            keep += [count_kept(size, self.level)] * len(layers)
        by_name: dict[str, list[Tensor]] = {name: [] for name in scores}
        shards = shards_of(scores, names)
        for name, mask in zip(names, keep_largest_each(tensors, keep, shards=shards), strict=True):
            by_name[name].append(mask)
        return {
            name: masks[0] if len(masks) == 1 else torch.cat(masks)
            for name, masks in by_name.items()
        }

    def __str__(self) -> str:
        return self._text("uniform")


@dataclass(frozen=True)
class RowTopK(UniformTopK):
    """Keeps the n - round(sparsity n) largest of the n weights of each output, exactly.

    n is the number of weights that an output sums over: the inputs of a Linear layer, inputs times
    kernel positions of a convolution.
    """

    @torch.no_grad()
    def select(self, scores: Weights) -> Masks:
        """Keeps the largest scores of every output; of equal scores the earlier is kept."""
        scores = local_weights(scores)
        masks = {}
        for name, score in scores.items():
            if cut_inputs(scores, name) is not None:
                raise ValueError(f"{self}: the rows of {name!r} are cut between processes")
            view = reduction_last(scores, name)
            rows = view.flatten(2)  # (groups, outputs, kernel x inputs)
            kept = keep_largest_in_rows(rows, count_kept(rows.shape[-1], self.level))
            masks[name] = torch.empty_like(score, dtype=torch.bool)
            reduction_last(scores, name, masks[name]).copy_(kept.view(view.shape))
        return masks

    def __str__(self) -> str:
        return self._text("row")


def _pair(operator: Sparsifier, levels: tuple[float, ...]) -> tuple[float, float]:
    if len(levels) != 2:
        raise ValueError(f"{type(operator).__name__}: a range is (low, high), not {levels!r}")
    return levels[0], levels[1]


def _checked(operator: Sparsifier, sparsity: float) -> float:
    number = isinstance(sparsity, Real) and not isinstance(sparsity, bool)
    if not number or not 0 <= sparsity < 1:
        raise ValueError(f"{type(operator).__name__}: sparsity must be in [0, 1), got {sparsity!r}")
    return float(sparsity) + 0.0  # -0.0 + 0.0 is 0.0, whose text can be read


def _decimal(level: float) -> str:
    """Returns the shortest text that reads back as `level`; an exponent's '-' would be a range."""
    text = repr(level)
    return text if "e" not in text else f"{level:.400f}".rstrip("0")
