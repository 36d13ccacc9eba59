"""Decoded images and the data sets made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from torchcram.experiments.data.images.pictures import PictureSet
from torchcram.experiments.seeds import seeded


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


Data = TypeVar("Data", DataSet, PictureSet)


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
