import os
import sys
import tempfile
from pathlib import Path

import pytest

from torchcram.experiments.training.parallel import CONTROL, LOGS, PIPES, shared_gpu

YES, NO = (sys.executable, "-S", "-c", ""), (sys.executable, "-S", "-c", "exit(1)")

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="a shell script stands in")


@pytest.fixture(autouse=True)
def _alone(monkeypatch, tmp_path):
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def control(tmp_path, monkeypatch):
    """Puts a program there that notes how it is called."""
    (tmp_path / "bin").mkdir()
    program, notes = tmp_path / "bin" / CONTROL, tmp_path / "notes"

    def make(status=0):
        program.write_text(
            f'#!/bin/sh\nif [ "$1" = -d ]\n'
            f'then echo "-d ${PIPES}" >> "{notes}"; exit {status}; fi\n'
            f'echo "$(cat) ${PIPES}" >> "{notes}"\n'
        )
        program.chmod(0o755)
        return notes

    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return make


def test_the_service_runs_during_the_block_and_not_after(control):
    notes, said = control(), []
    with shared_gpu(said.append, probe=YES) as environment:
        assert environment.keys() == {PIPES, LOGS}
        assert all(Path(path).is_dir() for path in environment.values())
        assert notes.read_text() == f"-d {environment[PIPES]}\n"
    assert notes.read_text().splitlines()[1:] == [f"quit {environment[PIPES]}"]
    assert not Path(environment[PIPES]).exists()
    assert said == []


def test_it_ends_with_an_interrupted_block_too(control):
    notes = control()
    with pytest.raises(KeyboardInterrupt), shared_gpu(print, probe=YES):
        raise KeyboardInterrupt
    assert notes.read_text().splitlines()[-1].startswith("quit ")


@pytest.mark.parametrize(
    ("status", "probe", "said", "calls"),
    [(1, YES, "does not start", ["-d"]), (0, NO, "does not work", ["-d", "quit"])],
)
def test_without_it_work_goes_on(control, status, probe, said, calls):
    notes, heard = control(status), []
    with shared_gpu(heard.append, probe=probe) as environment:
        assert environment == {}
    assert heard == [f"{CONTROL} {said} here: the processes take turns on the GPU"]
    assert [line.split()[0] for line in notes.read_text().splitlines()] == calls


def test_where_it_is_not_installed_that_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    heard = []
    with shared_gpu(heard.append) as environment:
        assert environment == {}
    assert "is not installed" in heard[0]


def test_one_that_runs_already_is_left_alone(control, monkeypatch, tmp_path):
    notes = control()
    monkeypatch.setenv(PIPES, str(tmp_path))
    with shared_gpu(print, probe=YES) as environment:
        assert environment == {}
    assert not notes.exists()


def test_nothing_is_done_if_it_is_not_wanted(control):
    notes = control()
    with shared_gpu(print, enabled=False, probe=YES) as environment:
        assert environment == {}
    assert not notes.exists()
