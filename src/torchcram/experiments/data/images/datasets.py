"""Image datasets: decoded into memory, or as files that are decoded while training."""

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
        """What an error message calls it."""

    def open(self) -> Image:
        """Opens it, decoded or not yet."""


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
    """An image file inside an archive, its bytes read already."""

    name: str
    content: bytes

    def open(self) -> Image:
        """Opens the bytes."""
        from PIL import Image

        return Image.open(io.BytesIO(self.content))


@dataclass(frozen=True)
class TorchvisionItem:
    """An item of a data set of torchvision."""

    name: str
    dataset: Any
    index: int

    def open(self) -> Image:
        """Takes the item, without its label."""
        image: Image = self.dataset[self.index][0]
        return image


@dataclass(frozen=True, eq=False)
class EncodedImages:
    """One split: encoded images and their labels, int64, (n,)."""

    images: Sequence[EncodedImage]
    labels: Tensor

    def __len__(self) -> int:
        return len(self.images)

    def take(self, index: Tensor) -> EncodedImages:
        """Returns the images at the places `index`, in that order."""
        chosen = tuple(self.images[place] for place in index.tolist())
        return EncodedImages(chosen, self.labels[index])


@dataclass(frozen=True, eq=False)
class EncodedDataset:
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
    """Returns the decoded image in RGB; a damaged one is an error that names it."""
    try:
        return image.open().convert("RGB")
    except Exception as error:  # Pillow raises many kinds
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
    """One split.

    Attributes:
        images: uint8, (n, h, w, channels).
        labels: int64, (n,).
    """

    images: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.dim() != 4:
            raise ValueError(
                f"images are {self.images.dtype} of shape {tuple(self.images.shape)}: "
                "needed is uint8, (n, h, w, channels)"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(
                f"labels are {self.labels.dtype} of shape {tuple(self.labels.shape)}: "
                f"needed is int64, ({len(self.images)},)"
            )

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: Tensor) -> Images:
        """Returns a copy of the images at the places `index`, in that order."""
        return Images(self.images[index], self.labels[index])


@dataclass(frozen=True, eq=False)
class DataSet:
    """A data set in memory, or mapped into it from a file.

    Attributes:
        name: of the data set.
        train: what to train on.
        test: what to test on.
        classes: their names; a label is a place here.
        mean: per channel, black is 0 and white 1; computed from `train` if not given.
        std: likewise.
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
                raise ValueError(f"data set {self.name!r} has a split without images")
            low, high = split.labels.aminmax()
            if low < 0 or high >= len(self.classes):
                raise ValueError(
                    f"data set {self.name!r} has labels from {int(low)} to {int(high)}: "
                    f"with {len(self.classes)} classes needed is 0 to {len(self.classes) - 1}"
                )
        train, test = (tuple(split.images.shape[1:]) for split in (self.train, self.test))
        if train != test:
            raise ValueError(
                f"data set {self.name!r} trains on images of (h, w, channels) {train}, "
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
    """Returns mean and standard deviation per channel; black is 0, white 1.

    A channel of one value has the deviation 1, so that dividing by it does no harm.
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


Data = TypeVar("Data", DataSet, EncodedDataset)


def hold_out(data: Data, fraction: float = 0.1, seed: int = 0) -> Data:
    """Returns `data` with a part of its training images, every class alike, to test on.

    The test images are left out; mean and standard deviation stay as they were.

    Args:
        data: to split.
        fraction: of every class that is tested on; at least one image of it is trained on.
        seed: of the choice.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction {fraction!r} is not between 0 and 1")
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
