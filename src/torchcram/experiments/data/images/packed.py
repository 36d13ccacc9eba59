"""Packed files: a dataset decoded once into one file that is mapped into memory."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchcram.experiments.data.images.datasets import (
    DataSet,
    Images,
    Picture,
    PictureSet,
    decode,
    pixels,
    resized,
)
from torchcram.experiments.io.files import one_process_at_a_time, remove_leftovers
from torchcram.files import let_read, written_aside

FORMAT = "torchcram images 1"
KEY = "torchcram"  # of the file's metadata
CHUNK = 64  # images decoded by a thread at a time
SMALL = 96 * 96  # pixels; to decode fewer takes less time than to change threads


class PackedError(ValueError):
    """A file that is not the packed data set it should be."""


def packed_name(name: str, image_size: int | None) -> str:
    """Returns what the packed file is called."""
    return f"{name}.{image_size or 'native'}.packed.safetensors"


def pack(data: PictureSet, image_size: int | None = None) -> DataSet:
    """Decodes all images into memory.

    Args:
        data: to decode.
        image_size: images are scaled to this at their short side and cut at the centre; None:
            they are as they are, and of one size.
    """
    first = data.train.pictures[0]
    wide, high = (image_size, image_size) if image_size else decode(first).size
    train, test = (
        Images(_decoded(split.pictures, (high, wide), first, image_size), split.labels)
        for split in (data.train, data.test)
    )
    return DataSet(data.name, train, test, data.classes)


def _decoded(
    pictures: Sequence[Picture], size: tuple[int, int], first: Picture, image_size: int | None
) -> Tensor:
    high, wide = size
    out = torch.empty((len(pictures), high, wide, 3), dtype=torch.uint8)

    def work(start: int) -> None:
        for place in range(start, min(start + CHUNK, len(pictures))):
            image = decode(pictures[place])
            if image_size:
                image = resized(image, image_size)
            if image.size != (wide, high):
                raise ValueError(
                    f"{pictures[place].name} is {image.width}x{image.height}, but {first.name} "
                    f"is {wide}x{high}: images of several sizes need image_size"
                )
            out[place] = pixels(image)

    small = not image_size and wide * high < SMALL
    with ThreadPoolExecutor(1 if small else os.cpu_count()) as pool:
        for _ in pool.map(work, range(0, len(pictures), CHUNK)):
            pass  # raises what was raised
    return out


def write_packed(data: DataSet, path: Path, *, image_size: int | None, source: str) -> None:
    """Writes the file aside, then moves it into place: it is never there by half.

    Args:
        data: to write.
        path: of the file, replaced if it is there.
        image_size: as the images were packed.
        source: a fingerprint of what they were packed from.
    """
    from safetensors.torch import save_file

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
        "train.images": data.train.images.contiguous(),
        "train.labels": data.train.labels.contiguous(),
        "test.images": data.test.images.contiguous(),
        "test.labels": data.test.labels.contiguous(),
    }
    with written_aside(path) as aside:
        save_file(tensors, aside, {KEY: json.dumps(description)})
        let_read(aside)


def read_packed(
    path: Path, *, name: str, image_size: int | None, source: str | None = None
) -> DataSet:
    """Maps a packed file into memory; a truncated or foreign one is a PackedError.

    Args:
        path: of the file.
        name: that the data set has to have.
        image_size: that it has to be packed with.
        source: the fingerprint it has to have; None: any.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})[KEY])
            wanted = {"format": FORMAT, "name": name, "image_size": image_size}
            if source is not None:
                wanted["source"] = source
            for key, value in wanted.items():
                if description[key] != value:
                    raise ValueError(f"its {key} is {description[key]!r}, needed is {value!r}")
            train, test = (
                Images(file.get_tensor(f"{split}.images"), file.get_tensor(f"{split}.labels"))
                for split in ("train", "test")
            )
        classes, mean, std = (tuple(description[key]) for key in ("classes", "mean", "std"))
        return DataSet(name, train, test, classes, mean, std)
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise PackedError(f"{path} is not the packed data set {name!r}: {error}") from error


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
    read: Callable[[], PictureSet]
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
    fingerprint, file = source.fingerprint(), packed_name(name, image_size)
    places = [source.folder / file, cache_folder() / file]

    def read(path: Path) -> DataSet:
        return read_packed(path, name=name, image_size=image_size, source=fingerprint)

    for path in places:
        if path.is_file():
            try:
                return read(path)
            except PackedError as error:
                warnings.warn(f"{error}; it is made anew", stacklevel=3)
    path = places[0] if writable(source.folder) else places[1]
    with one_process_at_a_time(path.parent):
        with suppress(PackedError):
            return read(path)  # another process made it meanwhile
        if report is not None:
            report(f"packing {name} into {path}")
        remove_leftovers(path.parent, file)
        data = pack(source.read(), image_size)
        write_packed(data, path, image_size=image_size, source=fingerprint)
    return read(path)


def cache_folder() -> Path:
    """Returns the user's cache folder for packed files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchcram"


def writable(folder: Path) -> bool:
    """Whether files may be put into a folder, or it is still to be made."""
    if not folder.is_dir():
        return True  # a download makes it
    # the mode too: a folder closed to writing stays as it is even when root comes by
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)
