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


def let_read(path: Path) -> None:
    """Lets those read a file who may read its folder; safetensors lets only the owner."""
    path.chmod(path.parent.stat().st_mode & 0o644)


def _sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system knows how."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
