"""Finds and reads the files of a text dataset, in a folder or in a .tar.xz archive of it."""

from __future__ import annotations

import fnmatch
import lzma
import tarfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from torchcram.experiments.data.images.folders import (
    ARCHIVE,
    archives_fingerprint,
    folder_fingerprint,
)
from torchcram.experiments.data.text.formats import TEXT_FORMATS

SPLITS = ("train", "dev")


@dataclass(frozen=True)
class Location:
    """Location of the files of a dataset.

    Attributes:
        folder: Folder that contains `source`; files that are made from it are put there.
        source: Folder of the files, or the archive.
        inside: Folder in the archive; "" if `source` is a folder.
    """

    folder: Path
    source: Path
    inside: str = ""

    def fingerprint(self) -> str:
        """Returns a text that changes if a file is added, removed, renamed or written."""
        if self.inside:
            return archives_fingerprint([self.source])
        return folder_fingerprint(self.source)


@dataclass(frozen=True)
class Split:
    """File of a split.

    Attributes:
        content: Content of the file.
        where: Name of the file in error messages.
    """

    content: bytes
    where: str


def find(name: str, task: str, folder: Path) -> Location:
    """Finds the folder NAME or the archive NAME.tar.xz; for GLUE also its own folder names.

    Args:
        name: Name of the dataset.
        task: Format of the dataset, one of `TEXT_FORMATS`.
        folder: Folder that the data lies in, or that of the files itself.

    Raises:
        ValueError: If there are no such files; the message says what was looked for.
    """
    names = [name]
    sentences = TEXT_FORMATS[task].sentences
    if sentences is not None and name == task:
        names += [f"glue/{sentences.folder}", sentences.folder]
    for path in names:
        if _has_train(folder / path, task):
            return Location(folder, folder / path)
    is_own = folder.absolute().name in {Path(path).name for path in names}
    if is_own and _has_train(folder, task):
        return Location(folder.absolute().parent, folder)
    for path in names:
        archive = folder / f"{path.split('/')[0]}{ARCHIVE}"
        if archive.is_file():
            return Location(folder, archive, path)
    looked = ", ".join([f"{path}/{_pattern(task, 'train')}" for path in names])
    archives = ", ".join(dict.fromkeys(f"{path.split('/')[0]}{ARCHIVE}" for path in names))
    raise ValueError(f"dataset {name!r} is not in {folder}: looked for {looked} and {archives}")


def read(location: Location, task: str) -> tuple[Split, Split]:
    """Reads the files of the training and the test split; nothing is unpacked to the disk.

    Raises:
        ValueError: If a file is missing, several match, or the archive is damaged.
    """
    suffix = Path(_pattern(task, "x")).suffix
    files = (
        read_archive(location, (suffix,))
        if location.inside
        else _in_folder(location.source, suffix)
    )
    splits = []
    for split in SPLITS:
        pattern = _pattern(task, split)
        matching = [name for name in sorted(files) if fnmatch.fnmatchcase(name, pattern)]
        if len(matching) != 1:
            there = ", ".join(matching) or "none"
            raise ValueError(f"{location.source}: one file {pattern} is needed; there is: {there}")
        where = f"{location.source}: {location.inside}/{matching[0]}"
        path = location.source / matching[0]
        splits.append(
            Split(files[matching[0]], where)
            if location.inside
            else Split(path.read_bytes(), str(path))
        )
    train, test = splits
    return train, test


def _pattern(task: str, split: str) -> str:
    return f"{split}*.json" if TEXT_FORMATS[task].sentences is None else f"{split}.tsv"


def _has_train(folder: Path, task: str) -> bool:
    return folder.is_dir() and any(folder.glob(_pattern(task, "train")))


def _in_folder(folder: Path, suffix: str) -> dict[str, bytes]:
    return {path.name: b"" for path in folder.glob(f"*{suffix}") if path.is_file()}


def read_archive(location: Location, suffixes: Collection[str]) -> dict[str, bytes]:
    """Reads the files of a folder in an archive that end with one of some suffixes, by name.

    Raises:
        ValueError: If the archive is damaged.
    """
    files: dict[str, bytes] = {}
    try:
        # tarfile's own decompression takes a truncated file for a complete one
        with lzma.open(location.source) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if str(path.parent) != location.inside or path.suffix not in suffixes:
                    continue
                content = tar.extractfile(member) if member.isfile() else None
                if content is not None:
                    files[path.name] = content.read()
            while stream.read(1 << 20):  # the checksum comes last
                pass
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise ValueError(f"{location.source} is damaged or no archive: {error}") from error
    return files
