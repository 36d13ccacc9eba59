"""Files that are never there by half, and folders that one process works in at a time."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".tmp"  # of files that are being written


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file of which, whenever the process or the machine stops, all is there or nothing.

    What was there before stays until the new content is on the disk.
    """
    with written_aside(path) as aside:
        aside.write_bytes(content)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """As `write_atomically`, for a `with` block that writes the file it is given."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}{SUFFIX}")
    try:
        yield aside
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what processes that were killed have left of a file, or of any, in a folder."""
    for path in folder.glob(f".{'*' if name is None else glob.escape(name)}.[0-9]*{SUFFIX}"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(folder: Path, *, patience: float = 0) -> Iterator[None]:
    """Keeps other processes out of `folder` for a `with` block; a killed one lets go of it.

    Args:
        folder: made if it is not there.
        patience: seconds to wait for another process to leave it.

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
        late = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= late:
                    said = f"{folder}: another process is working in this folder"
                    raise ValueError(said) from None
                time.sleep(0.1)
        yield


@contextmanager
def taking_turns(folder: Path) -> Iterator[None]:
    """Waits until no other process is in such a block; leaves no file behind."""
    try:
        import fcntl
    except ImportError:  # Windows: nobody waits
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    number = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system may not know locks of folders
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


def _sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system knows how."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
