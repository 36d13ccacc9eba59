"""Files and folders: their names, atomic writes, locks, and leftovers of killed processes."""

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

_ERROR_NUMBER = re.compile(r"os error (\d+)|code: (\d+)")  # in messages of safetensors
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # of Linux


def slug(text: str, keep: str = "") -> str:
    """Returns a text as part of a file name: "global:0.9" as "global-0.9".

    Args:
        text: Any text, such as that of an operator.
        keep: Characters that stay, besides letters, digits, ".", "_" and "-".
    """
    return re.sub(rf"[^A-Za-z0-9._{re.escape(keep)}-]+", "-", text)


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file as `torchcram.files.write_atomically` does, with errors that name the file."""
    with name_file_in_errors(path):
        files.write_atomically(path, content)


@contextmanager
def name_file_in_errors(path: Path | str) -> Iterator[None]:
    """Adds the file to operating-system errors that name no file, or a temporary one.

    When a disk is full, for instance, the error does not name the file. Errors of safetensors that
    come from the operating system become `OSError`.

    Args:
        path: Path of the file that the `with` block writes.

    Raises:
        OSError: If the operating system reports an error; it names the file.
    """
    try:
        yield
    except OSError as error:
        known = error.filename is not None and SUFFIX not in str(error.filename)
        if known or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:
        is_theirs = type(error).__name__ == "SafetensorError"
        match = _ERROR_NUMBER.search(str(error)) if is_theirs else None
        if match is None:
            raise
        number = int(match[1] or match[2])
        raise OSError(number, os.strerror(number), str(path)) from error


def remove_leftovers(folder: Path, name: str | None = None) -> None:
    """Removes temporary files of killed processes from a folder; those of living ones stay.

    Args:
        folder: Folder to look in; it need not exist.
        name: Name of the file or folder that was being written; by default any.
    """
    pattern = f".{'*' if name is None else glob.escape(name)}.[0-9]*{SUFFIX}"
    for path in folder.glob(pattern):
        remove_if_dead(path)


@contextmanager
def folder_written_aside(path: Path) -> Iterator[Path]:
    """Writes the files of a folder atomically: after the `with` block all are there, or none.

    The block writes into the temporary folder that it gets. Other files and folders that were in
    `path` stay there. On Linux the folders are exchanged in one step; elsewhere in two, and a
    process that is killed between them leaves no folder at `path`.

    Args:
        path: Path of the folder, which need not exist.

    Yields:
        Temporary folder to write into.
    """
    path = path.resolve()
    with temporary_folder(path) as folder, name_file_in_errors(path):
        aside = folder / "new"
        aside.mkdir()
        yield aside
        for entry in aside.rglob("*"):
            if entry.is_file():
                _sync(entry)
        if not path.exists():
            aside.rename(path)
        else:
            new = {entry.name for entry in aside.iterdir()}
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
    """Locks a folder against other processes for a `with` block.

    The lock ends with the process, also when it is killed. On Windows nothing is locked.

    Args:
        folder: Folder to lock, which is made if it does not exist.
        patience: Seconds to wait for a process that holds the lock.

    Raises:
        ValueError: If another process holds the lock.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("wb") as file:
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    problem = f"{folder}: another process is working in this folder"
                    raise ValueError(problem) from None
                time.sleep(0.1)
        yield


@contextmanager
def one_process_at_a_time(folder: Path) -> Iterator[None]:
    """Lets one process at a time into a `with` block; the others wait.

    Unlike `locked`, it makes no lock file in the folder. On Windows nobody waits.

    Args:
        folder: Folder that the processes share, which is made if it does not exist.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    with _opened(folder) as descriptor:
        with suppress(OSError):  # network file systems may not support locks on folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to the disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _exchange(new: Path, old: Path, trash: Path) -> None:
    """Moves the folder `new` to `old`, and `old` to `new` or, where that fails, to `trash`."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    paths = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old))
    if rename is None or rename(*paths, _RENAME_EXCHANGE) != 0:
        old.rename(trash)
        new.rename(old)
