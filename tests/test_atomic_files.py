"""Files that are written aside and put in place."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from torchcram import files
from torchcram.experiments.io.files import remove_leftovers
from torchcram.files import write_atomically, written_aside

DESCRIPTORS = Path("/proc/self/fd")
needs_locks = pytest.mark.skipif(sys.platform == "win32", reason="there is no flock")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_threads_that_write_to_one_path_do_not_disturb_each_other(tmp_path):
    path, count = tmp_path / "file", 8
    all_inside = threading.Barrier(count)
    seen, errors = [], []

    def write(number):
        content = bytes([number]) * 1000
        try:
            with written_aside(path) as aside:
                aside.write_bytes(content)
                all_inside.wait(60)
                seen.append(aside)
                assert aside.read_bytes() == content
        except BaseException as error:  # noqa: BLE001  shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert len(set(seen)) == count
    assert len(set(path.read_bytes())) == 1
    assert path.stat().st_size == 1000
    assert names(tmp_path) == ["file"]


WRITER = """
import sys, time
from pathlib import Path
from torchcram.files import written_aside

with written_aside(Path(sys.argv[1])) as aside:
    aside.write_bytes(b"half")
    (aside.parent / ".tmpAbCdEf").write_bytes(b"of safetensors")
    print("writing", flush=True)
    time.sleep(600)
"""


@needs_locks
def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    path = tmp_path / "model.safetensors"
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout.readline() == b"writing\n"
            (temporary,) = tmp_path.iterdir()
            write_atomically(path, b"whole")
            assert temporary.is_dir()
            remove_leftovers(tmp_path)
            assert {one.name for one in temporary.iterdir()} > {".tmpAbCdEf"}
        finally:
            process.send_signal(signal.SIGKILL)
    write_atomically(tmp_path / "model", b"another target")
    assert temporary.is_dir()
    write_atomically(path, b"again")
    assert names(tmp_path) == ["model", "model.safetensors"]
    assert path.read_bytes() == b"again"


@needs_locks
def test_only_leftovers_of_the_same_file_are_removed(tmp_path):
    others = [".mine.tmp", ".a.txt.tmp", ".a.txt.x1.tmp", ".a.txt.old.1.tmp", "a.txt.1.tmp"]
    own = [".a.txt.1.tmp", ".a.txt.12-0af3.tmp"]
    for name in (*others, *own):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".a.txt.7-ab.tmp").mkdir()  # killed before there was a lock
    write_atomically(tmp_path / "a.txt", b"whole")
    assert names(tmp_path) == sorted([*others, "a.txt"])


@needs_locks
def test_a_folder_that_is_taken_for_a_leftover_is_made_anew(tmp_path, monkeypatch):
    real, removed = Path.mkdir, []

    def mkdir(path, *args, **kwargs):
        real(path, *args, **kwargs)
        if path.name.startswith(".") and len(removed) < 2:
            removed.append(path)
            files.remove_if_dead(path)  # by another process, before it is locked

    monkeypatch.setattr(Path, "mkdir", mkdir)
    write_atomically(tmp_path / "file", b"whole")
    assert len(removed) == 2
    assert (tmp_path / "file").read_bytes() == b"whole"
    assert names(tmp_path) == ["file"]


def test_systems_without_locks_write_and_remove_nothing_of_others(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    path = tmp_path / "file"
    (tmp_path / ".file.1.tmp").write_bytes(b"half")
    with written_aside(path) as outer:
        outer.write_bytes(b"outer")
        write_atomically(path, b"inner")
        assert path.read_bytes() == b"inner"
    assert path.read_bytes() == b"outer"
    assert names(tmp_path) == [".file.1.tmp", "file"]


@pytest.mark.parametrize("written", [True, False])
def test_after_an_error_the_earlier_file_is_there_and_nothing_else(tmp_path, written):
    path = tmp_path / "file"
    path.write_bytes(b"before")

    def fail():
        with written_aside(path) as aside:
            if written:
                aside.write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_bytes() == b"before"
    assert names(tmp_path) == ["file"]


@pytest.mark.skipif(not DESCRIPTORS.exists(), reason="the system does not tell")
def test_no_descriptor_stays_open(tmp_path):
    before = len(list(DESCRIPTORS.iterdir()))
    for _ in range(3):
        write_atomically(tmp_path / "folder" / "file", b"whole")
    assert len(list(DESCRIPTORS.iterdir())) == before
