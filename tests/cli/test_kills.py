"""Commands killed at every change to their folders: files are whole, the next call cleans up."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from commands import SGD, succeed
from kills import check_kills, needs_fork
from runs import digits, recipe

from torchcram import artifact
from torchcram.experiments.tasks import Score
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.trainer import train
from torchcram.report.demo import write_files

pytestmark = needs_fork


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Folder that commands work in, that of temporary files in it; measuring is quick."""
    work = tmp_path / "work"
    (work / "tmp").mkdir(parents=True)
    monkeypatch.chdir(work)
    monkeypatch.setattr(tempfile, "tempdir", str(work / "tmp"))
    monkeypatch.setattr("torchcram.experiments.training.log._tensorboard", lambda *_: None)
    data = digits(train=1437, test=360)
    for module in ("compress", "export"):
        monkeypatch.setattr(f"torchcram.cli.{module}.load", lambda *_, **__: data)
    for module in ("evaluation.compressed_models.score_model", "export.score_on_test"):
        monkeypatch.setattr(f"torchcram.experiments.{module}", lambda *_, **__: Score(0.5))
    monkeypatch.setattr(
        "torchcram.experiments.evaluation.compressed_models.tune_", lambda *_, **__: None
    )
    return work


def trained(folder, data):
    """Returns work that trains in a folder, or trains on."""
    given = recipe(epochs=2)
    return lambda: train(given, folder, data=data, seed=0, device=torch.device("cpu"))


def is_log(path, content):
    """Says whether a file has times in it, and is whole apart from that."""
    if path.suffix == ".json":
        return bool(json.loads(content))
    if path.name == "log.jsonl":
        return content == b"" or [record.epoch for record in read_log(path.parent)] in ([1], [1, 2])
    if path.suffix == ".pt":
        return content.startswith(b"torchcram-checkpoint") and len(content) > 1000
    return False


def is_compact(path, content):
    """Says whether a compact file is whole."""
    try:
        artifact.verify(path)
    except (ValueError, OSError):
        return False
    return content is not None


def old(*names):
    """Makes files that a command is to replace."""
    for path in map(Path, names):
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"old")


def test_compress(folder, run):
    old("small/global-0.9.safetensors", "found.json")
    words = ("compress", run, "--to", "global:0.9", "--save", "small", "--json", "found.json")
    assert check_kills(lambda: succeed(*words), folder, sizes=(100, 5000)) > 8


def test_export(folder, run):
    old("files/global-0.9.torchcram.safetensors", "found.json")
    words = ("export", run, "--to", "global:0.9", "--out", "files", "--json", "found.json")
    kills = check_kills(lambda: succeed(*words), folder, whole=is_compact, sizes=(100, 5000))
    assert kills > 8


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--values", "fp16"), ("--format", "safetensors"), ("--format", "onnx")],
    ids=" ".join,
)
def test_export_of_other_kinds(folder, run, options):
    words = ("export", run, "--to", "global:0.9", *options, "--out", "files")
    assert check_kills(lambda: succeed(*words), folder, whole=is_compact, sizes=(5000,)) > 3


def test_report(folder, run):
    old("pages/report.html")
    words = ("report", run, "--out", "pages/report.html")
    assert check_kills(lambda: succeed(*words), folder, sizes=(100, 5000)) > 3


def test_files_of_the_demonstration(folder):
    old("a", "b")
    texts = {"a": b"first" * 500, "b": b"second" * 100}
    assert check_kills(lambda: write_files(folder, texts), folder, sizes=(100, 1000)) > 5


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_train(folder, every):
    work = trained(folder / "run", digits(train=64, test=32))
    assert check_kills(work, folder, whole=is_log, every=every) > 30 // every


@pytest.mark.slow
def test_sweep(folder, monkeypatch):
    data = digits(train=80, test=32)
    monkeypatch.setattr("torchcram.cli.sweep.load", lambda *_, **__: data)
    words = ("sweep", SGD, "--grid", "optimizer.lr=0.05,0.1", "--epochs", 1, "--out", "tried")
    targets = ("--set", "compress.to=[global:0.5]", "--set", "train.batch_size=16")
    kills = check_kills(lambda: succeed(*words, *targets, "--eager"), folder, whole=is_log)
    assert kills > 60
