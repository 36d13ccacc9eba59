"""Operators and pruners of another package, through the commands."""

import json
from pathlib import Path

import pytest
from commands import SGD, fail, succeed
from packages import install, install_blocks

from torchcram import artifact
from torchcram.experiments.results import read_result


def test_a_packages_operators_train_compress_and_export(tmp_path, monkeypatch):
    install_blocks(tmp_path / "packages", monkeypatch)
    sets = ["cram.operators=[blocks:0.5]", "compress.to=[blocks:0.5]"]
    options = [word for text in sets for word in ("--set", text)]
    recipe = "digits/convnet-digits/cram-plus-multi"
    succeed("train", recipe, "--epochs", 1, *options, "--out", "run")
    assert read_result("run/result.json").recipe["cram"]["operators"] == ["blocks:0.5"]

    targets = ("blocks:0.75", "blocks-obs:m2@blocks:0.5", "blocks:0.5+int8")
    words = [word for target in targets for word in ("--to", target)]
    succeed("compress", "run", *words, "--json", "found.json", "--save", "small")
    (seed,) = read_result("found.json").seeds
    assert [target.operator for target in seed.targets] == list(targets)
    assert seed.targets[0].sparsity == pytest.approx(0.75, abs=0.05)
    names = {"blocks-0.75", "blocks-obs-m2@blocks-0.5", "blocks-0.5+int8"}
    assert {path.stem for path in Path("small").iterdir()} == names

    succeed("export", "run", "--to", "blocks:0.5+int8", "--out", "files")
    (path,) = Path("files").iterdir()
    assert artifact.read_manifest(path).operator == "blocks:0.5+int8"
    assert "accuracy" in succeed("evaluate", "run", "--model", path).stdout
    succeed("finetune", "run", "--at", "blocks:0.5", "--epochs", 1, "--out", "tuned")


def test_they_are_listed_the_broken_ones_too(tmp_path, monkeypatch):
    install_blocks(tmp_path / "packages", monkeypatch)
    points = "[torchcram.operators]\nbroken = broken_module\n"
    install(
        tmp_path / "broken",
        monkeypatch,
        name="broken-package",
        entry_points=points,
        broken_module="import not_installed",
    )
    shown = succeed("list", "operators", "--json").stdout
    rows = json.loads(shown.removeprefix("blocks were imported\n"))
    said = {row["operator"]: row["what_it_does"] for row in rows}
    assert said["blocks:..."] == "Keeps the rows of the largest norms."
    assert said["blocks-obs@PATTERN"].startswith("pruner: Looks at the batches")
    assert "of broken-package 1.5 (broken_module) cannot be imported" in said["broken:..."]
    line = fail("train", SGD, "--set", "compress.to=[broken:0.5]", code=1)
    assert "broken-package 1.5" in line
