"""Base classes of compression operators C."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torchcram.weights import Masks, Weights


class Operator(ABC):
    """Compression C: weights -> weights, done in place.

    Operators are values (frozen dataclasses): comparable, hashable and without state;
    `str(operator)` identifies them, also in checkpoints. An operator receives all compressible
    weights at once, so that ranking over the whole model needs no special case.
    """

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
        """Whether it stands for a range of operators to train over."""
        return False

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
