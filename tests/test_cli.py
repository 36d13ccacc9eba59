import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import torchcram
from torchcram.cli import app
from torchcram.experiments.demo import CRAM, SGD
from torchcram.experiments.recipe import load_recipe


def torchcram_cli(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def tables(done):
    return done.stdout.split("┏")[1:]


def test_demo_prints_the_table_and_writes_the_files(tmp_path):
    out = tmp_path / "results"
    done = torchcram_cli("demo", "--epochs", 1, "--seed", 5, "--out", out)
    assert done.exit_code == 0, done.output
    for name, title in ((SGD, "SGD"), (CRAM, "CrAM+-Multi")):
        assert all(
            done.stdout.count(f"│ {target} ") == 2 for target in load_recipe(name).compress.to
        )
        assert title in done.stdout
    assert max(map(len, done.stdout.split("SGD: ")[0].splitlines())) <= 80
    assert {"SGD: 2 epochs", "CrAM+-Multi: 1 epoch"} <= set(done.stderr.splitlines())
    for name in ("picture.png", "page.html", "table.md"):
        assert (out / name).stat().st_size > 0
        assert str(out / name) in done.stdout
    for name in ("sgd-2-epochs-seed5", "cram-plus-multi-1-epochs-seed5"):
        assert f"run: {out / name}\n" in done.stdout
        (found,) = json.loads((out / name / "result.json").read_text())["seeds"]
        assert found["seed"] == 5
    again = torchcram_cli("demo", "--epochs", 1, "--seed", 5, "--out", out)
    assert tables(again)[0] == tables(done)[0]  # not the times of the second
    assert "epoch 1" not in again.stderr  # both are finished


@pytest.mark.parametrize("epochs", ["0", "-3", "many"])
def test_bad_epochs_are_refused(epochs, tmp_path):
    done = torchcram_cli("demo", f"--epochs={epochs}", "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "--epochs" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_file_in_the_way_is_refused_before_the_training(tmp_path):
    (tmp_path / "file").write_text("mine")
    done = torchcram_cli("demo", "--out", tmp_path / "file")
    assert done.exit_code == 2
    assert (tmp_path / "file").read_text() == "mine"
    done = torchcram_cli("demo", "--out", tmp_path / "file" / "below")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert "training" not in done.stderr


def test_the_table_is_there_even_if_writing_fails(tmp_path, monkeypatch):
    def full_disk(_runs, _folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torchcram.report.demo.write_demo", full_disk)
    done = torchcram_cli("demo", "--epochs", 1, "--out", tmp_path)
    assert done.exit_code == 1
    assert "│ global:0.95 " in done.stdout
    assert done.stderr.splitlines()[-1] == "error: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("module", "named"),
    [("sklearn", "sklearn"), ("jinja2", "jinja2"), ("matplotlib.figure", "matplotlib")],
)
def test_a_missing_extra_is_named_in_one_line(module, named, tmp_path, monkeypatch):
    for name in ("demo", "runs"):
        monkeypatch.delitem(sys.modules, f"torchcram.report.{name}", raising=False)
    monkeypatch.setitem(sys.modules, module, None)
    done = torchcram_cli("demo", "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert done.stderr == (
        f'error: the demo needs {named}, which is missing: pip install "torchcram[demo]"\n'
    )


def test_other_import_errors_are_not_hidden(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torchcram.report.demo", None)
    assert isinstance(torchcram_cli("demo", "--out", tmp_path).exception, ImportError)


def test_version_and_help():
    assert torchcram_cli("--version").stdout == f"torchcram {torchcram.__version__}\n"
    assert "demo" in torchcram_cli("--help").stdout


def test_python_m_torchcram_is_the_same_and_imports_nothing_heavy():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['torchcram', '--help']\n"
        "try:\n"
        "    runpy.run_module('torchcram', run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert end.code == 0, end.code\n"
        "heavy = {'sklearn', 'matplotlib', 'jinja2'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "demo" in done.stdout
