"""Base class of methods that train pruned weights only: those that hold their mask."""

from __future__ import annotations

from torchcram.baselines.base import Baseline
from torchcram.weights import apply_masks_, mask_gradients_


class HeldMask(Baseline):
    """Base class of methods that hold their mask between two selections.

    ::

        g~ <- M * g
        w  <- M * w       after every step

    A subclass selects M in `update_masks`, and then calls `hold_`, so that the dropped weights and
    their moments are zero. M = 1 trains all weights.
    """

    def combine_(self) -> None:
        """Masks the gradient: g~ = M * g."""
        mask_gradients_(self.weights, self.masks)

    def project_(self) -> None:
        """Keeps pruned weights at zero, also where weight decay or momentum would move them."""
        apply_masks_(self.weights, self.masks)
