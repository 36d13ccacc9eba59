"""Work that is killed at every change to a folder, in children that are forked for it."""

import itertools
import os
import shutil
import signal
import sys
import traceback
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest

try:
    import resource
except ImportError:  # Windows
    resource = None

needs_limits = pytest.mark.skipif(resource is None, reason="needs limits of file sizes")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def in_child(work):
    """Runs `work` in a child; returns the signal that ended it, or 0."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, which the child does not need
        child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def killed_at(work, folder, number):
    """Runs `work` in a child that is killed just before its so-manieth change below a folder.

    Returns:
        Whether it made as many.
    """
    below = f"{folder}{os.sep}"
    seen = 0

    def watch(event, arguments):
        nonlocal seen
        if not _changes(event, arguments, below):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched():
        sys.addaudithook(watch)
        work()

    return in_child(watched) == signal.SIGKILL


def _changes(event, arguments, below):
    if event == "open":
        path, _, flags = arguments
        if not isinstance(flags, int) or not flags & WRITING:
            return False
        paths = [path]
    elif event in CHANGES:
        paths = arguments
    else:
        return False
    names = [os.fsdecode(path) for path in paths if isinstance(path, (str, bytes, os.PathLike))]
    return any(os.path.abspath(name).startswith(below) for name in names)  # noqa: PTH100


@contextmanager
def full_disk(size):
    """Lets no file get larger, as where the disk is full; for compiled code too."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def killed_while_writing(work, size):
    """Runs `work` in a child that the system kills once a file gets larger than so many bytes.

    Compiled code is killed in the middle of a file as well.

    Returns:
        Whether a file would have got larger.
    """

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        work()

    return in_child(limited) == signal.SIGXFSZ


def contents(folder):
    """Returns every file below a folder with its bytes, and every folder with None."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def restore(folder, before):
    """Makes a folder what it was."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name, content in before.items():
        if content is None:
            (folder / name).mkdir(parents=True, exist_ok=True)
    for name, content in before.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def check_kills(work, folder, *, whole=None, every=1, sizes=()):
    """Kills `work` at its changes to a folder, and lets it run to its end afterwards.

    After each kill every file that is not hidden is as before or as it is to become; after the run
    that follows, the folder is as if nothing had been killed, with no leftovers.

    Args:
        work: What is run, and run again.
        folder: Folder it works in, with what is there before.
        whole: Function of a path and its content that says whether a new file is whole, for those
            that are not the same bytes at every run.
        every: Only every so-manieth change is a moment to kill at.
        sizes: Bytes of a file at which the system kills.

    Returns:
        How many kills there were.
    """
    before = contents(folder)
    work()  # here, so that children need import nothing; an import may make a cache in the folder
    restore(folder, before)
    work()
    after = contents(folder)
    assert after != before

    def same(name, content):
        return content == after[name] or (whole is not None and whole(folder / name, content))

    def check(moment):
        for name, content in contents(folder).items():
            if any(part.startswith(".") for part in Path(name).parts) or content is None:
                continue
            known = (name in before and content == before[name]) or (
                name in after and same(name, content)
            )
            assert known, f"{name} is neither old nor new after {moment}"
        for name in before:
            assert name.startswith(".") or (folder / name).exists(), f"no {name} after {moment}"
        work()
        found = contents(folder)
        assert found.keys() == after.keys(), f"after {moment}"
        assert all(same(name, content) for name, content in found.items()), f"after {moment}"

    kills = 0
    for number in itertools.count(1, every):
        restore(folder, before)
        if not killed_at(work, folder, number):
            break
        kills += 1
        check(f"change {number}")
    for size in sizes:
        restore(folder, before)
        assert killed_while_writing(work, size), size
        kills += 1
        check(f"{size} bytes")
    return kills
