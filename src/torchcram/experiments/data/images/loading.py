"""Loads image datasets by their names."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.experiments.data.images.datasets import (
    EncodedDataset,
    ImageDataset,
    Images,
    pixels,
    resized,
)
from torchcram.experiments.data.images.digits import split_digits
from torchcram.experiments.data.images.folders import (
    archives_fingerprint,
    find_archives,
    find_folder,
    folder_fingerprint,
    read_archives,
    read_folder,
)
from torchcram.experiments.data.images.packed import Source, packed, packed_alone
from torchcram.experiments.data.images.resident import STREAMED, check_augment
from torchcram.experiments.data.images.torchvision_sets import SETS, read_torchvision
from torchcram.experiments.io.cache import Report

if TYPE_CHECKING:
    from torchcram.experiments.data.config import DataConfig


DIGITS = "digits"


def dataset_names() -> dict[str, str]:
    """Returns a line about each dataset that is known by name; class folders come on top."""
    return {
        DIGITS: "handwritten digits of scikit-learn, 8x8, grey, 10 classes",
        **{name: known.title for name, known in SETS.items()},
    }


def load_data(
    config: DataConfig,
    folder: Path | None,
    *,
    download: bool = False,
    report: Report | None = None,
) -> ImageDataset | EncodedDataset:
    """Loads a dataset by its name.

    Images are decoded once, into one file beside the data, or in the user's cache folder if that is
    read-only; from then on the file is mapped into memory. With the augmentation
    "resized-crop-flip" the images stay encoded and are decoded while training.

    Args:
        config: Name, augmentation and image size. The name is one of `dataset_names()`, or that of
            a folder NAME/<split>/<class>/*.jpg or of archives of it, with the splits train and
            test or val.
        folder: Folder that the data lies in: that of the dataset, or the one that contains it or
            its archives.
        download: Whether to download a missing dataset, if torchvision can.
        report: Function that is called with a line of text before something that takes long.
    """
    check_augment(config.augment)
    if config.image_size is not None and config.image_size < 1:
        raise ValueError(f"image_size must be at least 1, got {config.image_size!r}")
    if config.name == DIGITS:
        return _digits(config)
    if folder is None:
        raise ValueError(f"dataset {config.name!r} needs the folder that the data lies in")
    if not config.name or Path(config.name).name != config.name or config.name == "..":
        raise ValueError(f"dataset {config.name!r} is not the name of a folder")
    source = _find(config.name, folder, download)
    if config.augment == STREAMED:
        return _streamed(config, folder, source)
    if source is not None:
        return packed(config.name, config.image_size, source, report=report)
    data = packed_alone(config.name, config.image_size, folder)
    if data is None:
        raise _missing(config.name, folder)
    return data


def _digits(config: DataConfig) -> ImageDataset:
    """Returns the digits, split as in the demonstration; resized and in colour if asked for."""
    if config.augment == STREAMED:
        raise ValueError(
            f"dataset {DIGITS!r} is resident: augment {config.augment!r} does not go with it"
        )
    train, labels, test, test_labels = split_digits()
    learnt, tested = (
        Images(_digit_pixels(values, config), targets)
        for values, targets in ((train, labels), (test, test_labels))
    )
    return ImageDataset(DIGITS, learnt, tested, tuple(map(str, range(10))))


def _digit_pixels(values: Tensor, config: DataConfig) -> Tensor:
    """Returns digits with values from 0 to 16 as uint8, (n, h, w, channels)."""
    images = values.mul(15).to(torch.uint8)  # still whole numbers
    if config.image_size not in (None, images.shape[-1]):
        from PIL import Image

        large = [resized(Image.fromarray(image.numpy()), config.image_size) for image in images]
        images = torch.stack([pixels(image.convert("RGB"))[..., 0] for image in large])
    return images.unsqueeze(-1).repeat(1, 1, 1, 3 if config.color else 1)


def _find(name: str, folder: Path, download: bool) -> Source | None:
    known = SETS.get(name)
    if known is not None:
        download = download and known.downloadable
        above = folder.absolute().parent
        itself = folder.absolute().name == Path(known.folder).parts[0]
        if (folder / known.folder).is_dir():
            root = folder
        elif itself and (above / known.folder).is_dir():
            root = above
        elif download:
            root = folder
        else:
            return None
        read = partial(read_torchvision, name, root, download=download)
        return Source(root, lambda: f"torchvision {known}", read)
    own = find_folder(name, folder)
    if own is not None:
        root = own.absolute().parent
        return Source(root, partial(folder_fingerprint, own), partial(read_folder, own))
    archives = find_archives(name, folder)
    if archives:
        fingerprint = partial(archives_fingerprint, archives)
        return Source(folder, fingerprint, partial(read_archives, name, archives), streams=False)
    return None


def _missing(name: str, folder: Path) -> ValueError:
    known = SETS.get(name)
    if known is None:
        return ValueError(
            f"dataset {name!r} is not in {folder}: looked for {name}/train, {name}.tar.xz and "
            f"{name}-train.tar.xz or {name}-train-1.tar.xz; known by name: "
            f"{', '.join(dataset_names())}"
        )
    how = "download it (--download)" if known.downloadable else "it cannot be downloaded"
    return ValueError(
        f"dataset {name!r} is not in {folder}: looked for {known.folder}, as torchvision's "
        f"{known.loader} has it; {how}"
    )


def _streamed(config: DataConfig, folder: Path, source: Source | None) -> EncodedDataset:
    if config.image_size is None:
        raise ValueError(f"augment {STREAMED!r} needs image_size, the size of what is cut out")
    if source is None:
        raise _missing(config.name, folder)
    if not source.streams:
        raise ValueError(
            f"augment {STREAMED!r} reads single files: unpack the archives of {config.name!r} in "
            f"{folder} first (tar -xJf)"
        )
    return source.read()
