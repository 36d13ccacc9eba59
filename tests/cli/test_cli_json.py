"""--json - writes the result to standard output, and nothing else goes there."""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import typer
from commands import command, fail, succeed

from torchcram.cli.errors import errors_in_a_line
from torchcram.cli.output import result_output
from torchcram.experiments.bench.record import Bench
from torchcram.experiments.evaluation.results import Result, read_result
from torchcram.experiments.io import json_text

BENCH = ("--rounds", 1, "--batch", 1, "--threads", 1, "--engines", "torch", "--no-accuracy")


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["compress", "RUN", "--to", "global:0.9", "--save", "small"], Result),
        (["compress", "RUN"], Result),
        (["export", "RUN", "--to", "global:0.9", "--out", "files"], Result),
        (["bench", "RUN", "--to", "global:0.9", *BENCH], Bench),
    ],
)
def test_standard_output_is_the_file(words, kind, run):
    words = [run if word == "RUN" else word for word in words]
    done = succeed(*words, "--json", "-")
    found = json_text.parse(kind, done.stdout, "standard output")
    assert not Path("-").exists()
    assert "│ global:0.9 " in done.stderr  # the table
    succeed(*words, "--json", "found.json")
    if kind is Result:
        assert done.stdout == Path("found.json").read_text()
    else:
        assert found.subjects == json_text.parse(kind, Path("found.json").read_bytes(), "").subjects


def test_what_libraries_print_goes_elsewhere(run, monkeypatch):

    from torchcram.experiments import results_store

    quiet = results_store.one_shot

    def talking(*arguments, **options):
        print("look at me")  # noqa: T201
        return quiet(*arguments, **options)

    monkeypatch.setattr(results_store, "one_shot", talking)
    done = succeed("compress", run, "--to", "global:0.9", "--json", "-")
    assert json.loads(done.stdout)["seeds"]
    assert "look at me\n" in done.stderr


def test_after_an_error_standard_output_is_empty(run):
    assert command("compress", run, "--to", "top:0.9", "--json", "-").stdout == ""
    (run / "model.safetensors").unlink()
    assert command("compress", run, "--json", "-").stdout == ""


def test_a_folder_for_the_file_is_made_before_the_work(run, monkeypatch):
    monkeypatch.setattr("torchcram.experiments.export.export", None)
    Path("file").write_text("mine")
    assert "file" in fail("export", run, "--to", "int4", "--json", "file/found.json")


def written_to(number, result, monkeypatch):
    """Writes a result to a file that is open by that number; returns what that raised."""
    stream = os.fdopen(number, "w")
    try:
        with monkeypatch.context() as patch, errors_in_a_line():
            patch.setattr(sys, "stdout", stream)
            with result_output(Path("-")) as write:
                write(result)
    except Exception as error:  # noqa: BLE001
        return error
    finally:
        with suppress(OSError):  # again
            stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_standard_output_that_is_full_is_a_line(run, monkeypatch, capfd):
    (seed,) = read_result(run / "result.json").seeds
    ended = written_to(os.open("/dev/full", os.O_WRONLY), seed, monkeypatch)
    assert isinstance(ended, typer.Exit)
    assert ended.exit_code == 1
    assert capfd.readouterr().err == "error: standard output: No space left on device\n"


def test_a_reader_that_has_gone_is_no_error_to_tell(run, monkeypatch, capfd):
    (seed,) = read_result(run / "result.json").seeds
    reading, writing = os.pipe()
    os.close(reading)
    assert isinstance(written_to(writing, seed, monkeypatch), BrokenPipeError)  # typer's to handle
    assert capfd.readouterr().err == ""
