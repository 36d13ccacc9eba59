"""Packed files: all images of a dataset, decoded once into a file that is mapped into memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcram.experiments.data.images.datasets import (
    EncodedDataset,
    EncodedImage,
    ImageDataset,
    Images,
    decode,
    pixels,
    resized,
)
from torchcram.experiments.io.cache import Report, cached, open_cache, write_cache

FORMAT = "torchcram images 1"
CHUNK = 64  # images that a thread decodes at a time
SMALL = 96 * 96  # pixels; images with fewer are decoded faster than threads are switched


def packed_name(name: str, image_size: int | None) -> str:
    """Returns the name of the packed file of a dataset."""
    return f"{name}.{image_size or 'native'}.packed.safetensors"


def pack(data: EncodedDataset, image_size: int | None = None) -> ImageDataset:
    """Decodes all images into memory.

    Args:
        data: Dataset to decode.
        image_size: Size that the short side is scaled to before the centre is cut out. None leaves
            the images as they are; all must have the same size then.
    """
    first = data.train.images[0]
    wide, high = (image_size, image_size) if image_size else decode(first).size
    train, test = (
        Images(_decoded(split.images, (high, wide), first, image_size), split.labels)
        for split in (data.train, data.test)
    )
    return ImageDataset(data.name, train, test, data.classes)


def _decoded(
    images: Sequence[EncodedImage],
    size: tuple[int, int],
    first: EncodedImage,
    image_size: int | None,
) -> Tensor:
    high, wide = size
    out = torch.empty((len(images), high, wide, 3), dtype=torch.uint8)

    def work(start: int) -> None:
        for index in range(start, min(start + CHUNK, len(images))):
            image = decode(images[index])
            if image_size:
                image = resized(image, image_size)
            if image.size != (wide, high):
                raise ValueError(
                    f"{images[index].name} is {image.width}x{image.height}, but {first.name} "
                    f"is {wide}x{high}: images of several sizes need image_size"
                )
            out[index] = pixels(image)

    small = not image_size and wide * high < SMALL
    with ThreadPoolExecutor(1 if small else os.cpu_count()) as pool:
        for _ in pool.map(work, range(0, len(images), CHUNK)):
            pass  # an error of a thread is raised here
    return out


def write_packed(data: ImageDataset, path: Path, *, image_size: int | None, source: str) -> None:
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
) -> ImageDataset:
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
    with open_cache(path, f"the packed dataset {name!r}", expected) as (file, description):
        train, test = (
            Images(file.get_tensor(f"{split}.images"), file.get_tensor(f"{split}.labels"))
            for split in ("train", "test")
        )
        classes, mean, std = (tuple(description[key]) for key in ("classes", "mean", "std"))
        return ImageDataset(name, train, test, classes, mean, std)


@dataclass(frozen=True)
class Source:
    """Files that a dataset is read from.

    Attributes:
        folder: Folder that the files lie in.
        fingerprint: Function that returns a text which changes with the files.
        read: Function that lists or reads the images.
        streams: Whether images can be read one by one, in any order.
    """

    folder: Path
    fingerprint: Callable[[], str]
    read: Callable[[], EncodedDataset]
    streams: bool = True


def packed_alone(name: str, image_size: int | None, folder: Path) -> ImageDataset | None:
    """Reads a packed file whose source is missing; returns None if there is no such file."""
    folders = [folder]
    if folder.absolute().name == name:
        folders.append(folder.absolute().parent)
    for candidate in folders:
        path = candidate / packed_name(name, image_size)
        if path.is_file():
            return read_packed(path, name=name, image_size=image_size)
    return None


def packed(
    name: str, image_size: int | None, source: Source, *, report: Report | None = None
) -> ImageDataset:
    """Reads the packed file of a source; makes it first if it is missing, damaged or out of date.

    It lies beside the source, or in the user's cache folder if that is read-only.

    Args:
        name: Name of the dataset.
        image_size: Size to pack the images with; None leaves them as they are.
        source: Files that the dataset is read from.
        report: Function that is called with a line of text before packing.
    """
    fingerprint = source.fingerprint()

    def read(path: Path) -> ImageDataset:
        return read_packed(path, name=name, image_size=image_size, source=fingerprint)

    def write(path: Path) -> None:
        if report is not None:
            report(f"packing {name} into {path}")
        data = pack(source.read(), image_size)
        write_packed(data, path, image_size=image_size, source=fingerprint)

    data, _ = cached(source.folder, packed_name(name, image_size), read=read, write=write)
    return data
