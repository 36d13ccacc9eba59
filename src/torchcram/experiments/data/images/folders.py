"""Datasets in class folders, <name>/<split>/<class>/..., on the disk or in .tar.xz archives."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath

import torch

from torchcram.experiments.data.images.datasets import (
    ArchiveMember,
    EncodedDataset,
    EncodedImage,
    EncodedImages,
    ImageFile,
)

TRAIN, TESTS = "train", ("test", "val")  # of the test splits, the first that exists is used
ARCHIVE = ".tar.xz"
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".webp", ".tif", ".tiff")

Split = dict[str, list[EncodedImage]]  # by class


def find_folder(name: str, folder: Path) -> Path | None:
    """Returns the folder of a dataset: `folder`/`name`, or `folder` if that is its name."""
    for root in (folder / name, folder):
        if root.absolute().name == name and (root / TRAIN).is_dir():
            return root
    return None


def find_archives(name: str, folder: Path) -> list[Path]:
    """Returns NAME.tar.xz, or else the parts NAME-SPLIT.tar.xz and NAME-SPLIT-NUMBER.tar.xz."""
    whole = folder / f"{name}{ARCHIVE}"
    if whole.is_file():
        return [whole]
    splits = "|".join((TRAIN, *TESTS))
    part = re.compile(rf"{re.escape(name)}-({splits})(-\d+)?{re.escape(ARCHIVE)}")
    return sorted(path for path in folder.glob(f"*{ARCHIVE}") if part.fullmatch(path.name))


def read_folder(root: Path) -> EncodedDataset:
    """Lists the images under `root`, which are decoded when needed."""
    splits: dict[str, Split] = {}
    for split in (TRAIN, *TESTS):
        if (root / split).is_dir():
            classes = sorted(p for p in (root / split).iterdir() if p.is_dir() and _shown(p.name))
            splits[split] = {path.name: _files(path) for path in classes}
    return _assembled(root.absolute().name, str(root), splits)


def read_archives(name: str, archives: Sequence[Path]) -> EncodedDataset:
    """Reads the encoded images of all archives into memory; nothing is unpacked to the disk.

    A thread reads each archive: most of the time goes into decompression.
    """
    splits: dict[str, Split] = {}
    seen: set[PurePosixPath] = set()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for entries in pool.map(partial(_read_archive, name), archives):
            for path, image in entries:
                images = splits.setdefault(path.parts[1], {}).setdefault(path.parts[2], [])
                if image is None:
                    continue
                if path in seen:
                    raise ValueError(f"{image.name} is there twice")
                seen.add(path)
                images.append(image)
    return _assembled(name, ", ".join(map(str, archives)), splits)


def folder_fingerprint(root: Path) -> str:
    """Returns a text that changes if a file under `root` is added, removed, renamed or written."""
    digest = hashlib.sha256()
    for directory, subdirectories, files in os.walk(root, followlinks=True):
        subdirectories.sort()
        for file in sorted(files):
            path = Path(directory, file)
            digest.update(os.fsencode(f"{path.relative_to(root).as_posix()}\0{_stamp(path)}\n"))
    return f"folder {digest.hexdigest()}"


def archives_fingerprint(archives: Sequence[Path]) -> str:
    """Returns a text that changes if an archive is added, removed, renamed or written."""
    return "archives " + ", ".join(f"{path.name} {_stamp(path)}" for path in archives)


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns}"  # the size of a bitmap says little


def _shown(name: str) -> bool:
    return not name.startswith(".")


def _is_image(name: str) -> bool:
    return _shown(name) and name.lower().endswith(SUFFIXES)


def _files(folder: Path) -> list[EncodedImage]:
    images: list[EncodedImage] = []
    for directory, _, files in os.walk(folder, followlinks=True):
        images += [ImageFile(str(Path(directory, file))) for file in files if _is_image(file)]
    return images


@contextmanager
def _damage_named(archive: Path) -> Iterator[None]:
    try:
        yield
    except (tarfile.TarError, lzma.LZMAError, EOFError, OSError) as error:
        raise ValueError(f"{archive} is damaged or no archive: {error}") from error


def _read_archive(name: str, archive: Path) -> list[tuple[PurePosixPath, ArchiveMember | None]]:
    """Returns the images of an archive by their paths, and its class folders without an image."""
    entries: list[tuple[PurePosixPath, ArchiveMember | None]] = []
    # tarfile's own decompression takes a truncated file for a complete one
    with _damage_named(archive), lzma.open(archive) as stream:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if len(path.parts) < 3 or path.parts[0] != name:
                    continue
                if path.parts[1] not in (TRAIN, *TESTS) or not _shown(path.parts[2]):
                    continue
                if member.isdir():
                    if len(path.parts) == 3:
                        entries.append((path, None))
                elif len(path.parts) > 3 and _is_image(path.name):
                    where = f"{archive}: {member.name}"
                    content = tar.extractfile(member) if member.isfile() else None
                    if content is None:
                        raise ValueError(f"{where} is not a plain file")
                    entries.append((path, ArchiveMember(where, content.read())))
        while stream.read(1 << 20):  # the checksum comes last
            pass
    return entries


def _assembled(name: str, where: str, splits: Mapping[str, Split]) -> EncodedDataset:
    """Checks the splits and numbers the classes in the order of their names."""
    test = next((split for split in TESTS if splits.get(split)), None)
    if not splits.get(TRAIN) or test is None:
        there = ", ".join(sorted(split for split in splits if splits[split])) or "none"
        raise ValueError(
            f"{where}: dataset {name!r} needs class folders in {name}/{TRAIN} and in one of "
            f"{' or '.join(f'{name}/{split}' for split in TESTS)}; with class folders are: {there}"
        )
    for split in (TRAIN, test):
        for label, images in splits[split].items():
            if not images:
                raise ValueError(f"{where}: class folder {name}/{split}/{label} has no images")
    classes = tuple(sorted(splits[TRAIN]))
    unknown = sorted(set(splits[test]) - set(classes))
    if unknown:
        raise ValueError(
            f"{where}: {len(unknown)} classes of {name}/{test} are not in {name}/{TRAIN}: "
            f"{', '.join(unknown[:5])}{', ...' if unknown[5:] else ''}"
        )
    return EncodedDataset(
        name, _numbered(splits[TRAIN], classes), _numbered(splits[test], classes), classes
    )


def _numbered(split: Split, classes: tuple[str, ...]) -> EncodedImages:
    images: list[EncodedImage] = []
    labels: list[int] = []
    for label, key in enumerate(classes):
        # by name, so that a folder and an archive of it are the same dataset
        images += sorted(split.get(key, ()), key=lambda image: image.name)
        labels += [label] * len(split.get(key, ()))
    return EncodedImages(tuple(images), torch.tensor(labels))
