"""Files that are never there by half."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUFFIX = ".tmp"  # of files that are being written


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file of which, whenever the process or the machine stops, all is there or nothing.

    What was there before stays until the new content is on the disk.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def remove_leftovers(folder: Path) -> None:
    """Removes what `write_atomically` left in `folder` when its process was killed."""
    for path in folder.glob(f".*{SUFFIX}"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes out of `folder` for a `with` block; a killed one lets go of it.

    Raises:
        ValueError: if another process is in it.
    """
    try:
        import fcntl
    except ImportError:  # Windows: nothing is kept out
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder}: another process is working in this folder") from None
        yield


def _sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system knows how."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
