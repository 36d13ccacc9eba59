"""Packed files: a dataset decoded once into one file that is mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcram.experiments.data.images.datasets import (
    DataSet,
    EncodedDataset,
    EncodedImage,
    Images,
    decode,
    pixels,
    resized,
)
from torchcram.experiments.io.cache import cached, open_cache, write_cache

FORMAT = "torchcram images 1"
CHUNK = 64  # images decoded by a thread at a time
SMALL = 96 * 96  # pixels; to decode fewer takes less time than to change threads


def packed_name(name: str, image_size: int | None) -> str:
    """Returns what the packed file is called."""
    return f"{name}.{image_size or 'native'}.packed.safetensors"


def pack(data: EncodedDataset, image_size: int | None = None) -> DataSet:
    """Decodes all images into memory.

    Args:
        data: to decode.
        image_size: images are scaled to this at their short side and cut at the centre; None:
            they are as they are, and of one size.
    """
    first = data.train.images[0]
    wide, high = (image_size, image_size) if image_size else decode(first).size
    train, test = (
        Images(_decoded(split.images, (high, wide), first, image_size), split.labels)
        for split in (data.train, data.test)
    )
    return DataSet(data.name, train, test, data.classes)


def _decoded(
    images: Sequence[EncodedImage],
    size: tuple[int, int],
    first: EncodedImage,
    image_size: int | None,
) -> Tensor:
    high, wide = size
    out = torch.empty((len(images), high, wide, 3), dtype=torch.uint8)

    def work(start: int) -> None:
        for place in range(start, min(start + CHUNK, len(images))):
            image = decode(images[place])
            if image_size:
                image = resized(image, image_size)
            if image.size != (wide, high):
                raise ValueError(
                    f"{images[place].name} is {image.width}x{image.height}, but {first.name} "
                    f"is {wide}x{high}: images of several sizes need image_size"
                )
            out[place] = pixels(image)

    small = not image_size and wide * high < SMALL
    with ThreadPoolExecutor(1 if small else os.cpu_count()) as pool:
        for _ in pool.map(work, range(0, len(images), CHUNK)):
            pass  # raises what was raised
    return out


def write_packed(data: DataSet, path: Path, *, image_size: int | None, source: str) -> None:
    """Writes a packed file, atomically.

    Args:
        data: Dataset to write.
        path: Path of the file, which is replaced if it exists.
        image_size: Size that the images were packed with.
        source: Fingerprint of the files that the images were packed from.
    """
    description = {
        "format": FORMAT,
        "name": data.name,
        "image_size": image_size,
        "source": source,
        "classes": data.classes,
        "mean": data.mean,
        "std": data.std,
    }
    tensors = {
        "train.images": data.train.images,
        "train.labels": data.train.labels,
        "test.images": data.test.images,
        "test.labels": data.test.labels,
    }
    write_cache(path, tensors, description)


def read_packed(
    path: Path, *, name: str, image_size: int | None, source: str | None = None
) -> DataSet:
    """Maps a packed file into memory.

    Args:
        path: Path of the file.
        name: Name that the dataset must have.
        image_size: Size that it must be packed with.
        source: Fingerprint that its source must have; None allows any.

    Raises:
        CacheError: If the file is damaged or holds something else.
    """
    expected = {"format": FORMAT, "name": name, "image_size": image_size}
    if source is not None:
        expected["source"] = source
    with open_cache(path, f"the packed data set {name!r}", expected) as (file, description):
        train, test = (
            Images(file.get_tensor(f"{split}.images"), file.get_tensor(f"{split}.labels"))
            for split in ("train", "test")
        )
        classes, mean, std = (tuple(description[key]) for key in ("classes", "mean", "std"))
        return DataSet(name, train, test, classes, mean, std)


Report = Callable[[str], None]


@dataclass(frozen=True)
class Source:
    """Files of a data set that were found.

    Attributes:
        folder: that they lie in.
        fingerprint: tells them from others.
        read: lists or reads the images.
        streams: whether images can be read one by one, in any order.
    """

    folder: Path
    fingerprint: Callable[[], str]
    read: Callable[[], EncodedDataset]
    streams: bool = True


def packed_alone(name: str, image_size: int | None, folder: Path) -> DataSet | None:
    """Reads a packed file whose source is not there, or no more; None if there is none."""
    places = [folder]
    if folder.absolute().name == name:
        places.append(folder.absolute().parent)
    for place in places:
        path = place / packed_name(name, image_size)
        if path.is_file():
            return read_packed(path, name=name, image_size=image_size)
    return None


def packed(
    name: str, image_size: int | None, source: Source, *, report: Report | None = None
) -> DataSet:
    """Reads the packed file of `source`, made before if it is missing, damaged or of other files.

    It lies beside the source, or in the user's cache folder where that is read-only.

    Args:
        name: of the data set.
        image_size: to pack it with; None: as the images are.
        source: what to pack.
        report: called with a line before packing.
    """
    fingerprint = source.fingerprint()

    def read(path: Path) -> DataSet:
        return read_packed(path, name=name, image_size=image_size, source=fingerprint)

    def write(path: Path) -> None:
        if report is not None:
            report(f"packing {name} into {path}")
        data = pack(source.read(), image_size)
        write_packed(data, path, image_size=image_size, source=fingerprint)

    data, _ = cached(source.folder, packed_name(name, image_size), read=read, write=write)
    return data
