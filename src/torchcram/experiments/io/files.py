"""Folders that one process works in at a time, and what a killed process leaves behind."""

from __future__ import annotations

import ctypes
import glob
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torchcram import files
from torchcram.files import SUFFIX, remove_if_dead, temporary_folder

_CODE = re.compile(r"os error (\d+)|code: (\d+)")  # in what safetensors says
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def write_atomically(path: Path, content: bytes) -> None:
    """As `torchcram.files.write_atomically`, with errors that name the file."""
    with naming_errors(path):
        files.write_atomically(path, content)


@contextmanager
def naming_errors(path: Path | str) -> Iterator[None]:
    """Names a file in errors of the system that name none, or one that is temporary.

    Where a disk is full, the system does not say for which file. safetensors raises errors of its
    own, which become those of the system.

    Args:
        path: Path of the file that the `with` block writes.

    Raises:
        OSError: For every error of the system, with the file.
    """
    try:
        yield
    except OSError as error:
        known = error.filename is not None and SUFFIX not in str(error.filename)
        if known or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        code = _CODE.search(str(error)) if type(error).__name__ == "SafetensorError" else None
        if code is None:
            raise
        number = int(code[1] or code[2])
        raise OSError(number, os.strerror(number), str(path)) from error


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes have left in a folder; what living ones write stays.

    Args:
        folder: Folder to look in; it need not be there.
        name: Name of the file or folder that was being written; by default any.
    """
    pattern = f".{'*' if name is None else glob.escape(name)}.[0-9]*{SUFFIX}"
    for path in folder.glob(pattern):
        remove_if_dead(path)


@contextmanager
def folder_written_aside(path: Path) -> Iterator[Path]:
    """Fills a folder in a `with` block; `path` has all of the new files at once, or none.

    Files and folders of other names that were in `path` stay there. On Linux the exchange is one
    step; elsewhere a process that is killed between two steps leaves no folder.

    Args:
        path: Path of the folder, which need not be there.
    """
    path = path.resolve()
    with temporary_folder(path) as folder, naming_errors(path):
        aside = folder / "new"
        aside.mkdir()
        yield aside
        for written in aside.rglob("*"):
            if written.is_file():
                _sync(written)
        if not path.exists():
            aside.rename(path)
        else:
            new = {written.name for written in aside.iterdir()}
            shutil.copytree(
                path,
                aside,
                symlinks=True,
                dirs_exist_ok=True,
                copy_function=_link,
                ignore=lambda at, names: new.intersection(names if Path(at) == path else ()),
            )
            _exchange(aside, path, folder / "old")
        _sync(path.parent)


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
    with _opened(folder) as number:
        with suppress(OSError):  # a network file system may not know locks of folders
            fcntl.flock(number, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY)
    try:
        yield number
    finally:
        os.close(number)


def _sync(path: Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    with _opened(path) as number:
        os.fsync(number)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without such links
        shutil.copy2(source, target)


def _exchange(new: Path, old: Path, trash: Path) -> None:
    """Gives `new` the name of the folder `old`, and the other way round or to `trash`."""
    swap = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if swap is None or swap(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE):
        old.rename(trash)
        new.rename(old)
