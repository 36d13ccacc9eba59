"""Files that are never there by half."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SUFFIX = ".tmp"
"""End of the names of files and folders that are being written."""

_CONTENT = f"content{SUFFIX}"  # no search for "*.json" finds it
_OWNER = r"\d+(-[0-9a-f]+)?"  # process and call; a process alone in earlier versions


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file of which, whenever the process or the machine stops, all is there or nothing.

    What was there before stays until the new content is on the disk.
    """
    with written_aside(path) as aside:
        aside.write_bytes(content)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """As `write_atomically`, for a `with` block that writes the file it is given.

    The block writes into a hidden folder beside `path`, with a name of its own for every call, so
    that threads and processes may write to one path at the same time: the last one to finish wins.
    The folder goes when the block ends. What a killed process has left of the same path is removed
    by the next call: the lock on the folder, which the system gives back when a process dies, tells
    it from what is being written.
    """
    with temporary_folder(path) as folder:
        aside = folder / _CONTENT
        yield aside
        with aside.open("rb+") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    _sync_folder(path.parent)


def remove_if_dead(temporary: Path) -> None:
    """Removes a temporary file or folder unless a living process or thread is writing it.

    Where the system has no such locks, nobody can tell, and it stays.
    """
    lock = _lock(temporary)
    if lock is None:
        return
    try:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
    finally:
        os.close(lock)


def let_read(path: Path) -> None:
    """Lets those read a file who may read its folder; safetensors lets only the owner."""
    path.chmod(path.parent.stat().st_mode & 0o644)


def _temporaries(folder: Path, name: str) -> list[Path]:
    """Returns what is being written, or was left, of the file `name` in a folder."""
    pattern = re.compile(rf"\.{re.escape(name)}\.{_OWNER}{re.escape(SUFFIX)}")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Makes a temporary folder beside `path`, locked for a `with` block and removed after it.

    Removes what killed processes have left of the same path first. A folder rather than a file:
    safetensors puts temporary files of its own beside what it writes.

    Args:
        path: Path whose name the hidden name of the folder begins with.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in _temporaries(path.parent, path.name):
        remove_if_dead(leftover)
    mode = stat.S_IMODE(path.parent.stat().st_mode) | stat.S_IRWXU  # as `let_read` expects
    while True:
        owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        folder = path.with_name(f".{path.name}.{owner}{SUFFIX}")
        lock = None
        try:
            folder.mkdir()
            with suppress(FileNotFoundError):
                folder.chmod(mode)
            lock = _lock(folder, wait=True)
            if _is_there(folder, lock):  # else it was taken for a leftover before it was locked
                yield folder
                return
        finally:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)


def _lock(temporary: Path, *, wait: bool = False) -> int | None:
    """Locks a temporary file or folder until the file descriptor that is returned is closed.

    Args:
        temporary: File of an earlier version, or folder.
        wait: Whether to wait for whoever holds the lock.

    Returns:
        None where another process or thread holds the lock, the file or folder is gone, or the
        system has no such locks.
    """
    try:
        import fcntl
    except ImportError:
        return None
    try:
        descriptor = os.open(temporary, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:  # locked, or on a network file system that does not know locks of folders
        os.close(descriptor)
        return None
    return descriptor


def _is_there(folder: Path, lock: int | None) -> bool:
    """Returns whether a folder has not been removed while its lock was waited for."""
    if lock is None:
        return folder.exists()
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Brings the names in a folder to the disk, where the system knows how."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
