"""Images as they lie in files: encoded, of any size, decoded when they are needed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Picture(Protocol):
    """An encoded image."""

    @property
    def name(self) -> str:
        """What an error message calls it."""

    def open(self) -> Image:
        """Opens it, decoded or not yet."""


@dataclass(frozen=True)
class File:
    """An image file."""

    name: str

    def open(self) -> Image:
        """Opens the file."""
        from PIL import Image

        return Image.open(self.name)


@dataclass(frozen=True)
class Member:
    """An image file inside an archive, its bytes read already."""

    name: str
    content: bytes

    def open(self) -> Image:
        """Opens the bytes."""
        from PIL import Image

        return Image.open(io.BytesIO(self.content))


@dataclass(frozen=True)
class Item:
    """An item of a data set of torchvision."""

    name: str
    dataset: Any
    index: int

    def open(self) -> Image:
        """Takes the item, without its label."""
        image: Image = self.dataset[self.index][0]
        return image


@dataclass(frozen=True, eq=False)
class Pictures:
    """One split: encoded images and their labels, int64, (n,)."""

    pictures: Sequence[Picture]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.pictures)

    def take(self, index: Tensor) -> Pictures:
        """Returns the images at the places `index`, in that order."""
        chosen = tuple(self.pictures[place] for place in index.tolist())
        return Pictures(chosen, self.labels[index])


@dataclass(frozen=True, eq=False)
class PictureSet:
    """A data set whose images stay encoded: too large, or of too many sizes, to be resident.

    Attributes:
        name: of the data set.
        train: what to train on.
        test: what to test on.
        classes: their names; a label is a place here.
        mean: per channel, black is 0 and white 1; that of ImageNet, as is usual.
        std: likewise.
    """

    name: str
    train: Pictures
    test: Pictures
    classes: tuple[str, ...]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


def decode(picture: Picture) -> Image:
    """Returns the decoded image in RGB; a damaged one is an error that names it."""
    try:
        return picture.open().convert("RGB")
    except Exception as error:  # Pillow raises many kinds
        raise ValueError(f"{picture.name} is not a readable image: {error}") from error


def resized(image: Image, size: int) -> Image:
    """Scales the short side to `size` and cuts out the centre, size x size."""
    from PIL import Image as Pillow

    width, height = image.size
    short = min(width, height)
    wide = max(size, round(width * size / short))
    high = max(size, round(height * size / short))
    if (wide, high) != (width, height):
        image = image.resize((wide, high), Pillow.Resampling.BILINEAR)
    left, top = (wide - size) // 2, (high - size) // 2
    return image.crop((left, top, left + size, top + size))


def pixels(image: Image) -> Tensor:
    """Returns an RGB image as uint8, (h, w, 3)."""
    values = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return values.view(image.height, image.width, 3)
