"""Base classes of compression operators C."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torchcram.weights import Masks, Weights


class Operator(ABC):
    """Compression C: weights -> weights, done in place.

    Operators are values (frozen dataclasses): comparable, hashable and without state;
    `str(operator)` identifies them, also in checkpoints. An operator receives all compressible
    weights at once, so that ranking over the whole model needs no special case.

    Attributes:
        supports_shards: Whether it computes the same over weights of which every rank holds some
            rows (FSDP2) as over whole ones. Operators that do not are refused there.
    """

    supports_shards: ClassVar[bool] = False

    @abstractmethod
    def compress_(self, weights: Weights) -> Masks | None:
        """Replaces `weights` by C(weights) and returns the mask M, True where a weight is kept.

        None means that C has no mask and that the gradient at the compressed point stays dense.
        """

    def recompress_(self, weights: Weights, masks: Masks) -> None:  # noqa: ARG002
        """Replaces `weights` by C(weights), reusing `masks` of an earlier use.

        Whatever else an operator does, such as rounding, is done anew.
        """
        if self.compress_(weights) is not None:
            raise ValueError(
                f"{self} has masks but no recompress_ to use them again: mask_interval must be 1"
            )

    @property
    def parts(self) -> tuple[Operator, ...]:
        """Operators that are applied one after another: itself, unless it is a chain."""
        return (self,)

    @property
    def is_range(self) -> bool:
        """Whether it stands for a range of operators to train over: those with a `draw` do."""
        return type(self).draw is not Operator.draw

    def draw(self, generator: torch.Generator) -> Operator:  # noqa: ARG002
        """Returns the operator of one step: itself, unless it stands for a range of operators."""
        return self


class Sparsifier(Operator):
    """Operator that keeps some weights unchanged and zeroes the rest."""

    @abstractmethod
    def select(self, scores: Weights) -> Masks:
        """Returns masks of the weights to keep, which have the larger scores in magnitude."""

    @torch.no_grad()
    def compress_(self, weights: Weights) -> Masks:
        """Keeps the weights that `select` chooses by magnitude, and zeroes the others."""
        masks = self.select(weights)
        apply_masks_(weights, masks)
        return masks

    def recompress_(self, weights: Weights, masks: Masks) -> None:
        """Zeroes the weights that `masks` do not keep."""
        apply_masks_(weights, masks)


def require_shard_support(operators: Iterable[Operator]) -> None:
    """Raises ValueError if an operator computes something else over shards of weights."""
    for operator in operators:
        if not all(part.supports_shards for part in operator.parts):
            raise ValueError(
                f"{operator} does not say that it works on weights that FSDP has sharded: each "
                "rank would select among its own rows (see Operator.supports_shards)"
            )
