import ctypes
import errno
import os
import threading

import pytest
from kills import check_kills, needs_fork

from torchcram.experiments.io.files import (
    folder_written_aside,
    locked,
    name_file_in_errors,
    remove_leftovers,
    slug,
)
from torchcram.files import temporary_folder

fcntl = pytest.importorskip("fcntl")


@pytest.mark.parametrize(
    ("text", "keep", "name"),
    [
        ("global:0.9", "", "global-0.9"),
        ("nm:2:4", "", "nm-2-4"),
        ("global:0.8+int4", "", "global-0.8-int4"),
        ("global:0.8+int4", "+", "global-0.8+int4"),
        ("obs:m64@uniform:0.7", "", "obs-m64-uniform-0.7"),
        ("obs:m64@uniform:0.7", "+@", "obs-m64@uniform-0.7"),
        ("a_b-c/../d  e", "", "a_b-c-..-d-e"),
        ("]^[a", "^]", "]^-a"),
    ],
)
def test_a_text_becomes_part_of_a_file_name(text, keep, name):
    assert slug(text, keep) == name


def test_one_waits_for_another_to_leave_a_folder(tmp_path):
    inside, leave, entered = threading.Event(), threading.Event(), threading.Event()

    def first():
        with locked(tmp_path):
            inside.set()
            leave.wait(60)

    def second():
        with locked(tmp_path, patience=60):
            entered.set()

    threads = [threading.Thread(target=work) for work in (first, second)]
    threads[0].start()
    assert inside.wait(60)
    threads[1].start()
    with (
        pytest.raises(ValueError, match="another process is working in this folder"),
        locked(tmp_path, patience=0.3),
    ):
        pass
    assert not entered.is_set()
    leave.set()
    assert entered.wait(60)
    for thread in threads:
        thread.join()


LEFT = ["{}.123.tmp", "{}.123-ab12.tmp", "{}.123-ab12.tmp/"]  # files, and a folder


@pytest.mark.parametrize("form", LEFT)
def test_what_a_killed_process_has_left_is_removed(tmp_path, form):
    for name in (".mine", ".other"):
        path = tmp_path / form.format(name)
        if form.endswith("/"):
            path.mkdir()
            path /= "content.tmp"
        path.write_bytes(b"half")
    (tmp_path / ".mine.tmp").write_bytes(b"of somebody else")
    remove_leftovers(tmp_path, "mine")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".mine.tmp",
        form.format(".other").strip("/"),
    ]
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".mine.tmp"]
    remove_leftovers(tmp_path / "nowhere")


@pytest.mark.parametrize("held", [".a.1.tmp", ".a.1.tmp/"])
def test_what_a_living_process_holds_stays(tmp_path, held):
    path = tmp_path / held
    path.parent.mkdir(exist_ok=True)
    if held.endswith("/"):
        path.mkdir()
    else:
        path.write_bytes(b"")
    number = os.open(path, os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    remove_leftovers(tmp_path)
    assert path.exists()
    os.close(number)
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_temporary_folders_are_apart_and_go(tmp_path):
    with temporary_folder(tmp_path / "new" / "a") as one, temporary_folder(one.parent / "a") as two:
        assert one != two
        assert one.is_dir()
        (two / "file").write_bytes(b"x")
        remove_leftovers(one.parent)
        assert (two / "file").exists()
        assert {path.parent for path in (one, two)} == {tmp_path / "new"}
    assert list((tmp_path / "new").iterdir()) == []


def fill(path, **contents):
    with folder_written_aside(path) as aside:
        for name, content in contents.items():
            (aside / name).write_text(content)


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_is_filled_at_once_and_other_files_stay(tmp_path):
    path = tmp_path / "model"
    fill(path, a="1", b="1")
    (path / "notes").mkdir()
    (path / "notes" / "mine").write_text("mine")
    (path / "link").symlink_to("a")
    with folder_written_aside(path) as aside:
        (aside / "a").write_text("2")
        (aside / "c").write_text("2")
        assert contents(path) == {"a": "1", "b": "1", "notes/mine": "mine", "link": "1"}
    assert contents(path) == {"a": "2", "b": "1", "c": "2", "notes/mine": "mine", "link": "2"}
    assert (path / "link").is_symlink()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_folder_is_exchanged_by_two_steps_where_the_system_knows_no_better(tmp_path, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: None)  # without renameat2
    test_a_folder_is_filled_at_once_and_other_files_stay(tmp_path)


def test_after_an_error_a_folder_is_as_it_was(tmp_path):
    path = tmp_path / "model"
    fill(path, a="1")

    def full():
        with folder_written_aside(path) as aside:
            (aside / "a").write_text("2")
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as caught:
        full()
    assert caught.value.filename == str(path)
    assert contents(path) == {"a": "1"}
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


class SafetensorError(Exception):
    pass


FULL = os.strerror(errno.ENOSPC)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, FULL),
        OSError(errno.ENOSPC, FULL, "files/.name.12-ab.tmp/content.tmp"),
        SafetensorError(f"Error while serializing: I/O error: {FULL} (os error 28)"),
        SafetensorError(f'IoError(Os {{ code: 28, kind: StorageFull, message: "{FULL}" }})'),
    ],
)
def test_errors_of_the_system_name_the_file(error):
    with pytest.raises(OSError, match="No space") as caught, name_file_in_errors("files/name"):
        raise error
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "files/name")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(2, "No such file", "another"),
        OSError("in words"),
        SafetensorError("no tensor"),
        ValueError("os error 28"),
    ],
)
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as caught, name_file_in_errors("files/name"):
        raise error
    assert caught.value is error


@needs_fork
@pytest.mark.parametrize("there", [True, False])
def test_a_folder_is_whole_whenever_the_process_is_killed(tmp_path, there):
    folder = tmp_path / "work"
    folder.mkdir()
    path = folder / "model"
    if there:
        fill(path, a="1" * 5000, b="1")
        (path / "mine").write_text("mine")
    old = contents(path) if there else None

    def work():
        if path.exists():  # both files are old, or both are new
            assert contents(path) in (old, new)
        fill(path, a="2" * 4000, b="2")

    new = {"a": "2" * 4000, "b": "2", **({"mine": "mine"} if there else {})}
    assert check_kills(work, folder, sizes=(100, 1000)) > 5
