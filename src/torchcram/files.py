"""Files that are written atomically: whole, or not at all."""

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
"""Suffix of the names of files and folders that are being written."""

_CONTENT = f"content{SUFFIX}"  # a search for "*.json" does not match it
_OWNER = r"\d+(-[0-9a-f]+)?"  # process and call; earlier versions wrote only the process


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, whenever the process or the machine stops.

    An existing file stays until the new content is on the disk.
    """
    with written_aside(path) as aside:
        aside.write_bytes(content)


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """Yields a temporary path for a `with` block to write; moves it to `path` after the block.

    The temporary path is in a hidden folder beside `path` whose name is unique to the call, so that
    threads and processes may write to one path at the same time: the last one to finish wins. The
    folder is removed when the block ends. The next call for the same path removes the folders of
    killed processes: their locks, which the system releases when a process dies, tell them from
    folders in use.
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

    On a system without file locks this cannot be known, and the file or folder stays.
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
    """Makes a file readable to all who may read its folder; safetensors allows only the owner."""
    path.chmod(path.parent.stat().st_mode & 0o644)


def _temporaries(folder: Path, name: str) -> list[Path]:
    """Returns the temporary files and folders of the file `name` in a folder."""
    pattern = re.compile(rf"\.{re.escape(name)}\.{_OWNER}{re.escape(SUFFIX)}")
    return [path for path in folder.iterdir() if pattern.fullmatch(path.name)]


@contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """Makes a temporary folder beside `path`, locked for a `with` block and removed after it.

    Folders that killed processes have left for the same path are removed first. It is a folder
    rather than a file because safetensors puts temporary files of its own beside what it writes.

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
            if _exists_still(folder, lock):  # or another call removed it before it was locked
                yield folder
                return
        finally:
            if lock is not None:
                os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)


def _lock(temporary: Path, *, wait: bool = False) -> int | None:
    """Locks a temporary file or folder until the returned file descriptor is closed.

    Args:
        temporary: Temporary folder, or temporary file of an earlier version.
        wait: Whether to wait until the lock is free.

    Returns:
        File descriptor; None if another process or thread holds the lock, the file or folder is
        gone, or the system has no file locks.
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
    except OSError:  # locked, or a network file system that cannot lock folders
        os.close(descriptor)
        return None
    return descriptor


def _exists_still(folder: Path, lock: int | None) -> bool:
    """Returns whether a folder still exists after waiting for its lock."""
    if lock is None:
        return folder.exists()
    try:
        return os.path.samestat(os.fstat(lock), folder.stat())
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    """Flushes the entries of a folder to the disk, if the system supports it."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
