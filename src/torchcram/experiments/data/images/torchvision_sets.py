"""Datasets of torchvision: CIFAR, and those that models are transferred to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.error import URLError

import torch

from torchcram.experiments.data.images.datasets import (
    EncodedDataset,
    EncodedImages,
    TorchvisionItem,
)
from torchcram.experiments.seeds import seeded

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class TorchvisionSet:
    """How a dataset is loaded by torchvision.

    Attributes:
        title: Line about the dataset.
        loader: Name of the class in torchvision.datasets.
        folder: Folder of the files inside the data folder.
        train: Arguments for each part of the training split.
        test: Arguments for the test split; None where a single split is divided by `per_class`.
        labels: Name of the attribute with the labels, or with pairs of a file and a label.
        per_class: Numbers of images per class to train on and to test on; None takes all others.
        downloadable: Whether the files can still be downloaded.
    """

    title: str
    loader: str
    folder: str
    train: tuple[Arguments, ...] = ({"split": "train"},)
    test: Arguments | None = field(default_factory=lambda: {"split": "test"})
    labels: str = "_labels"
    per_class: tuple[int, int | None] = (0, 0)
    downloadable: bool = True


TRAIN_AND_VAL = ({"split": "train"}, {"split": "val"})
TRAINVAL = ({"split": "trainval"},)
CIFAR_TRAIN, CIFAR_TEST = ({"train": True},), {"train": False}

SETS: Mapping[str, TorchvisionSet] = {
    "cifar10": TorchvisionSet(
        "CIFAR-10, 32x32, 10 classes",
        loader="CIFAR10",
        folder="cifar-10-batches-py",
        train=CIFAR_TRAIN,
        test=CIFAR_TEST,
        labels="targets",
    ),
    "cifar100": TorchvisionSet(
        "CIFAR-100, 32x32, 100 classes",
        loader="CIFAR100",
        folder="cifar-100-python",
        train=CIFAR_TRAIN,
        test=CIFAR_TEST,
        labels="targets",
    ),
    "caltech101": TorchvisionSet(
        "Caltech-101, 30 images of each of 101 classes to train on, the others to test on",
        loader="Caltech101",
        folder="caltech101",
        train=({},),
        test=None,
        labels="y",
        per_class=(30, None),
    ),
    "caltech256": TorchvisionSet(
        "Caltech-256, 60 images of each of 257 classes to train on, the others to test on",
        loader="Caltech256",
        folder="caltech256",
        train=({},),
        test=None,
        labels="y",
        per_class=(60, None),
    ),
    "dtd": TorchvisionSet(
        "Describable Textures, 47 classes, partition 1",
        loader="DTD",
        folder="dtd/dtd",
        train=TRAIN_AND_VAL,
    ),
    "fgvc-aircraft": TorchvisionSet(
        "FGVC-Aircraft, 100 variants",
        loader="FGVCAircraft",
        folder="fgvc-aircraft-2013b",
        train=TRAINVAL,
    ),
    "flowers102": TorchvisionSet(
        "Oxford Flowers, 102 classes",
        loader="Flowers102",
        folder="flowers-102",
        train=TRAIN_AND_VAL,
    ),
    "food101": TorchvisionSet("Food-101, 101 classes", loader="Food101", folder="food-101"),
    "oxford-iiit-pet": TorchvisionSet(
        "Oxford-IIIT Pet, 37 classes",
        loader="OxfordIIITPet",
        folder="oxford-iiit-pet",
        train=TRAINVAL,
    ),
    "stanford-cars": TorchvisionSet(
        "Stanford Cars, 196 classes; cannot be downloaded any more",
        loader="StanfordCars",
        folder="stanford_cars",
        labels="_samples",
        downloadable=False,
    ),
    "sun397": TorchvisionSet(
        "SUN397, 50 images of each of 397 classes to train on, 50 to test on",
        loader="SUN397",
        folder="SUN397",
        train=({},),
        test=None,
        per_class=(50, 50),
    ),
}


def read_torchvision(name: str, root: Path, *, download: bool) -> EncodedDataset:
    """Lists the images of a dataset of torchvision.

    Args:
        name: Name of the dataset, a key of `SETS`.
        root: Data folder, which contains the folder of the dataset.
        download: Whether to download a missing dataset; torchvision checks its files.
    """
    known = SETS[name]
    train = [_open(name, root, arguments, download) for arguments in known.train]
    classes = getattr(train[0], "classes", None) or getattr(train[0], "categories", None)
    if known.test is None:
        learnt, tested = _divided(name, _encoded_images(name, train[0]))
    else:
        parts = [_encoded_images(name, dataset) for dataset in train]
        learnt = EncodedImages(
            tuple(image for part in parts for image in part.images),
            torch.cat([part.labels for part in parts]),
        )
        tested = _encoded_images(name, _open(name, root, known.test, download))
    if classes is None:  # Flowers102 of older versions has no names
        classes = [str(label) for label in range(int(learnt.labels.max()) + 1)]
    return EncodedDataset(name, learnt, tested, tuple(classes))


def _open(name: str, root: Path, arguments: Arguments, download: bool) -> Any:  # noqa: ANN401
    from torchvision import datasets

    loader = getattr(datasets, SETS[name].loader)
    try:
        return loader(str(root), **arguments, download=download)
    except (RuntimeError, OSError) as error:
        failed = f"downloaded to {root}" if isinstance(error, URLError) else f"read from {root}"
        raise ValueError(f"dataset {name!r} cannot be {failed}: {error}") from error


def _encoded_images(name: str, dataset: Any) -> EncodedImages:  # noqa: ANN401
    values = getattr(dataset, SETS[name].labels)
    labels = [int(value[1] if isinstance(value, tuple) else value) for value in values]
    order: Sequence[int] = range(len(labels))
    if name == "sun397":  # torchvision lists the files in the order of the file system
        order = sorted(order, key=lambda index: dataset._image_files[index].as_posix())
    images = tuple(TorchvisionItem(f"image {index} of {name}", dataset, index) for index in order)
    return EncodedImages(images, torch.tensor([labels[index] for index in order]))


def _divided(name: str, whole: EncodedImages) -> tuple[EncodedImages, EncodedImages]:
    """Divides the images of every class at random, the same way every time."""
    generator = seeded("split", name)
    train, test = [], []
    count, rest = SETS[name].per_class
    for label in whole.labels.unique():
        members = (whole.labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        train.append(members[:count])
        test.append(members[count:][:rest])
    return whole.take(torch.cat(train).sort().values), whole.take(torch.cat(test).sort().values)
