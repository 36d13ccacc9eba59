"""Folders that one process works in at a time, and what a killed one leaves there."""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchcram.files import SUFFIX, remove_if_dead


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what processes that were killed have left of a file, or of any, in a folder."""
    for path in folder.glob(f".{'*' if name is None else glob.escape(name)}.[0-9]*{SUFFIX}"):
        remove_if_dead(path)


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
