"""Operators, pruners and models of another package, through the commands."""

import json
import re
from pathlib import Path

import pytest
from commands import SGD, fail, succeed
from packages import install, install_blocks
from test_docs import ROOT, blocks

from torchcram import artifact
from torchcram.experiments.evaluation.results import read_result


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


MODEL = """
from torch import nn


def net(num_classes, width=8):
    layers = [nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64 * width, num_classes))
"""


@pytest.mark.parametrize("name", ["blocks_nets:net", "./packages/blocks_nets.py:net"])
def test_a_packages_model_goes_through_every_command(tmp_path, monkeypatch, name):
    packages = tmp_path / "packages"
    install(packages, monkeypatch, entry_points="", blocks_nets=MODEL)
    sets = [f"model.name={name}", "model.args={width: 4}", "compress.to=[global:0.5]"]
    sets += ["name=digits/blocks-net/sgd"]
    options = [word for text in sets for word in ("--set", text)]
    succeed("train", SGD, "--epochs", 1, *options)
    run = Path("runs/digits/blocks-net/sgd/seed0")
    model = read_result(run / "result.json").recipe["model"]
    assert model["name"] == name.replace("./packages", str(packages))
    assert model["args"] == {"width": 4}

    before = (run / "model.safetensors").read_bytes()
    (run / "model.safetensors").unlink()  # as if it had been stopped before the end
    succeed("train", SGD, "--epochs", 1, *options)
    assert (run / "model.safetensors").read_bytes() == before

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = tmp_path / run
    assert "accuracy" in succeed("evaluate", run).stdout
    succeed("compress", run, "--to", "global:0.9", "--json", "found.json")
    succeed("export", run, "--to", "global:0.9", "--out", "files")
    (path,) = Path("files").iterdir()
    assert "accuracy" in succeed("evaluate", run, "--model", path).stdout
    succeed("finetune", run, "--at", "global:0.5", "--epochs", 1, "--out", "tuned")
    line = fail("train", run / "recipe.yaml", "--from", run, "--set", "model.args={width: 5}")
    assert "its model.args is {'width': 4}, that of digits/blocks-net/sgd is {'width': 5}" in line


def test_the_model_and_the_recipe_of_the_guide_train():
    (code,) = [block for block in blocks(ROOT / "CONTRIBUTING.md") if "def mlp" in block]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = "".join(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    Path("nets.py").write_text(code)
    Path("mine.yaml").write_text(recipe)
    succeed("train", "mine.yaml", "--epochs", 1, "--set", "compress.to=[global:0.5]")
    run = Path("runs/digits/nets-mlp/mine/seed0")
    assert (run / "model.safetensors").is_file()
    said = read_result(run / "result.json").recipe
    assert said["model"]["args"] == {"width": 128}
    assert (said["optimizer"]["name"], said["schedule"]["name"]) == ("RMSprop", "StepLR")
