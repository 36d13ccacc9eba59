"""What a compression operator C is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torchcram.weights import Masks, Weights


class Operator(ABC):
    """A compression C: weights -> weights, done in place.

    Operators are values (frozen dataclasses): comparable, hashable, without state; `str(operator)`
    names them, in checkpoints too. They see all compressible weights at once, so that ranking over
    the whole model is nothing special.
    """

    @abstractmethod
    def compress_(self, weights: Weights) -> Masks | None:
        """Replaces `weights` by C(weights) and returns the mask M, True where a weight is kept.

        None means that C has no mask and that the gradient at the compressed point stays dense.
        """

    def recompress_(self, weights: Weights, masks: Masks) -> None:  # noqa: ARG002
        """Replaces `weights` by C(weights), with `masks` of an earlier use in place of new ones.

        What an operator does beside masking, such as rounding, is done anew.
        """
        if self.compress_(weights) is not None:
            raise ValueError(
                f"{self} has masks but no recompress_ to use them again: mask_interval must be 1"
            )

    @property
    def parts(self) -> tuple[Operator, ...]:
        """The operators that it applies one after another: itself, unless it is a chain."""
        return (self,)

    @property
    def is_range(self) -> bool:
        """Whether it stands for a range of operators, to train over."""
        return False

    def draw(self, generator: torch.Generator) -> Operator:  # noqa: ARG002
        """Returns the operator for one step: itself, unless it stands for a range of them."""
        return self


class Sparsifier(Operator):
    """An operator that keeps some weights as they are and zeroes the rest."""

    @abstractmethod
    def select(self, scores: Weights) -> Masks:
        """Returns the mask of what to keep; a larger magnitude of the score is better."""

    @torch.no_grad()
    def compress_(self, weights: Weights) -> Masks:
        """Keeps the weights that `select` chooses by their magnitude, zeroes the others."""
        masks = self.select(weights)
        apply_masks_(weights, masks)
        return masks

    def recompress_(self, weights: Weights, masks: Masks) -> None:
        """Zeroes what `masks` do not keep."""
        apply_masks_(weights, masks)
