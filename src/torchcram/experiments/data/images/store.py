"""Packed files: where they lie, when one is used, when it is made."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchcram.experiments.data.images.images import DataSet
from torchcram.experiments.data.images.packed import (
    PackedError,
    pack,
    packed_name,
    read_packed,
    write_packed,
)
from torchcram.experiments.data.images.pictures import PictureSet
from torchcram.experiments.io.files import remove_leftovers, taking_turns

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
    with taking_turns(path.parent):
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
