"""Image datasets: decoded in memory, or encoded and decoded while training."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from torchcram.experiments.seeds import seeded

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class EncodedImage(Protocol):
    """An encoded image."""

    @property
    def name(self) -> str:
        """Name of the image in error messages."""

    def open(self) -> Image:
        """Opens the image with Pillow, which may decode it later."""


@dataclass(frozen=True)
class ImageFile:
    """An image file."""

    name: str

    def open(self) -> Image:
        """Opens the file."""
        from PIL import Image

        return Image.open(self.name)


@dataclass(frozen=True)
class ArchiveMember:
    """An image file of an archive, in memory."""

    name: str
    content: bytes

    def open(self) -> Image:
        """Opens the file."""
        from PIL import Image

        return Image.open(io.BytesIO(self.content))


@dataclass(frozen=True)
class TorchvisionItem:
    """An item of a torchvision dataset."""

    name: str
    dataset: Any
    index: int

    def open(self) -> Image:
        """Returns the image of the item, without its label."""
        image: Image = self.dataset[self.index][0]
        return image


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """One split of an `EncodedDataset`.

    Attributes:
        images: Encoded images.
        labels: Labels, int64, (n,).
    """

    images: Sequence[EncodedImage]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Tensor) -> EncodedImages:
        """Returns the images at the indices `index`, in that order."""
        chosen = tuple(self.images[number] for number in index.tolist())
        return EncodedImages(chosen, self.labels[index])


@dataclass(frozen=True, eq=False)
class EncodedDataset:
    """A dataset whose images stay encoded, because they are too large or of different sizes.

    Attributes:
        name: Name of the dataset.
        train: Training split.
        test: Test split.
        classes: Names of the classes; a label is an index into them.
        mean: Mean per channel, where black is 0 and white 1; that of ImageNet, as is usual.
        std: Standard deviation per channel, likewise that of ImageNet.
    """

    name: str
    train: EncodedImages
    test: EncodedImages
    classes: tuple[str, ...]
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD

    @property
    def contents(self) -> str:
        """No digest: name, sizes, classes and mean tell image datasets apart."""
        return ""


def decode(image: EncodedImage) -> Image:
    """Returns the decoded image in RGB.

    Raises:
        ValueError: If the image is damaged; it is named.
    """
    try:
        return image.open().convert("RGB")
    except Exception as error:  # Pillow raises many kinds of errors
        raise ValueError(f"{image.name} is not a readable image: {error}") from error


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


@dataclass(frozen=True, eq=False)
class Images:
    """One split of a `ImageDataset`.

    Attributes:
        images: Pixels, uint8, (n, h, w, channels).
        labels: Labels, int64, (n,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise ValueError(
                "images must be uint8 of shape (n, h, w, channels), got "
                f"{self.images.dtype} of shape {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels must be int64 of shape ({len(self.images)},), got "
                f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> Images:
        """Returns a copy of the images at the indices `index`, in that order."""
        return Images(self.images[index], self.labels[index])


@dataclass(frozen=True, eq=False)
class ImageDataset:
    """A dataset of decoded images, in memory or mapped into it from a file.

    Attributes:
        name: Name of the dataset.
        train: Training split.
        test: Test split.
        classes: Names of the classes; a label is an index into them.
        mean: Mean per channel, where black is 0 and white 1; by default that of `train`.
        std: Standard deviation per channel; by default that of `train`.
    """

    name: str
    train: Images
    test: Images
    classes: tuple[str, ...]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for split in (self.train, self.test):
            if not len(split):
                raise ValueError(f"dataset {self.name!r} has a split without images")
            low, high = split.labels.aminmax()
            if low < 0 or high >= len(self.classes):
                raise ValueError(
                    f"dataset {self.name!r} has {len(self.classes)} classes: labels must be from 0 "
                    f"to {len(self.classes) - 1}, got {int(low)} to {int(high)}"
                )
        train, test = (tuple(split.images.shape[1:]) for split in (self.train, self.test))
        if train != test:
            raise ValueError(
                f"dataset {self.name!r} trains on images of (h, w, channels) {train}, "
                f"tests on {test}"
            )
        if not self.mean or not self.std:
            mean, std = channel_statistics(self.train.images)
            object.__setattr__(self, "mean", self.mean or mean)
            object.__setattr__(self, "std", self.std or std)

    @property
    def contents(self) -> str:
        """No digest: name, sizes, classes and mean tell image datasets apart."""
        return ""


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Returns the mean and the standard deviation per channel, where black is 0 and white 1.

    The deviation of a constant channel is given as 1, so that dividing by it does no harm.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in images.unbind(-1):
        # counts are exact, whatever the number of pixels
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = share @ values
        means.append(float(mean))
        deviations.append(float((share @ (values - mean).square()).sqrt()) or 1.0)
    return tuple(means), tuple(deviations)


Data = TypeVar("Data", ImageDataset, EncodedDataset)


def hold_out(data: Data, fraction: float = 0.1, seed: int = 0) -> Data:
    """Returns a dataset with a part of the training images, every class alike, as test split.

    The test images of `data` are left out; mean and standard deviation stay as they are.

    Args:
        data: Dataset whose training split is divided.
        fraction: Fraction of every class to test on; at least one image of a class is left to
            train on.
        seed: Seed of the choice.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction!r}")
    generator = seeded(seed, "hold out")
    labels = data.train.labels
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        members = (labels == label).nonzero().flatten()
        count = min(round(fraction * len(members)), len(members) - 1)
        held[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    if not held.any():
        raise ValueError(
            f"fraction {fraction!r} of the {len(labels)} training images of {data.name!r} "
            "is less than one image in every class"
        )
    train = data.train.take((~held).nonzero().flatten())
    test = data.train.take(held.nonzero().flatten())
    return replace(data, train=train, test=test)
