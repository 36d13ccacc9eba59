"""Augmentations as numbers drawn ahead: from which pixel of an image a batch reads, which way."""

from __future__ import annotations

import torch
from torch import Tensor

RESIDENT = ("none", "shift", "crop-flip")
STREAMED = "resized-crop-flip"
AUGMENTS = (*RESIDENT, STREAMED)


def check_augment(augment: str, allowed: tuple[str, ...] = AUGMENTS) -> None:
    """Refuses what is not one of `allowed`."""
    if augment not in allowed:
        raise ValueError(f"augment {augment!r} is not one of {', '.join(map(repr, allowed))}")


def margins(augment: str, height: int, width: int) -> tuple[int, int]:
    """Returns how many black pixels go above and below an image, and left and right of it."""
    check_augment(augment, RESIDENT)
    if augment == "none":
        return 0, 0
    if augment == "shift":
        return 1, 1
    return height // 8, width // 8


def draw(
    count: int, augment: str, size: tuple[int, int], *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws a crop, and whether to flip it, for each of `count` images.

    Args:
        count: of images.
        augment: one of `RESIDENT`.
        size: height and width of an image without its margins.
        generator: to draw from.

    Returns:
        The first pixel to read, as a place in the padded and flattened image, and the direction
        to read a row in: 1, or -1 if it is flipped.
    """
    height, width = size
    above, aside = margins(augment, height, width)
    top = torch.randint(2 * above + 1, (count,), generator=generator)
    left = torch.randint(2 * aside + 1, (count,), generator=generator)
    flip = torch.randint(2 if augment == "crop-flip" else 1, (count,), generator=generator)
    first = top * (width + 2 * aside) + left + flip * (width - 1)
    return first, 1 - 2 * flip
