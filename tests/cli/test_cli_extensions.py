"""Operators, pruners, models, tasks and methods of another package, through the commands."""

import json
import re
from pathlib import Path

import numpy
import pytest
from commands import SGD, fail, succeed
from packages import install, install_blocks
from test_docs import ROOT, blocks

from torchcram import artifact
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.tasks import TASKS, ImageClassification, register_task
from torchcram.experiments.training.log import read_log


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


def yaml_blocks(page):
    return re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)


def test_the_model_and_the_recipe_of_the_guide_train():
    (code,) = [block for block in blocks(ROOT / "CONTRIBUTING.md") if "def mlp" in block]
    page = (ROOT / "CONTRIBUTING.md").read_text()
    recipe = "".join(found for found in yaml_blocks(page) if "task:" not in found)
    Path("nets.py").write_text(code)
    Path("mine.yaml").write_text(recipe)
    succeed("train", "mine.yaml", "--epochs", 1, "--set", "compress.to=[global:0.5]")
    run = Path("runs/digits/nets-mlp/mine/seed0")
    assert (run / "model.safetensors").is_file()
    said = read_result(run / "result.json").recipe
    assert said["model"]["args"] == {"width": 128}
    assert (said["optimizer"]["name"], said["schedule"]["name"]) == ("RMSprop", "StepLR")


TABLE_RECIPE = """
name: flowers/mlp/cram
train: {epochs: 3, batch_size: 32, precision: fp32}
optimizer: {lr: 0.05}
schedule: {warmup_epochs: 0}
cram: {operators: ["global:0.5"], rho: 0.05}
compress: {to: ["global:0.5", int8], watch: "global:0.5"}
"""
NETS = """
from torch import nn


def rows(num_classes, inputs=2):
    layers = [nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, num_classes)]
    return nn.Sequential(*layers)
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Installs the task of the guide; returns a recipe for it."""
    monkeypatch.setattr(TASKS, "kinds", dict(TASKS.kinds))
    (code,) = [block for block in blocks(ROOT / "CONTRIBUTING.md") if "class Table" in block]
    points = "[torchcram.tasks]\ntable = tables\n"
    install(tmp_path / "packages", monkeypatch, entry_points=points, tables=code, nets=NETS)
    generator = numpy.random.default_rng(0)
    labels = generator.integers(0, 3, 400)
    rows = numpy.eye(3)[labels][:, :2] * 4 + generator.normal(size=(400, 2))
    Path("data").mkdir()
    numpy.savetxt("data/flowers.csv", numpy.column_stack([rows, labels]), delimiter=",")
    page = (ROOT / "CONTRIBUTING.md").read_text()
    (section,) = [block for block in yaml_blocks(page) if "task:" in block]
    Path("mine.yaml").write_text(section + TABLE_RECIPE)
    return "mine.yaml"


def test_a_packages_task_goes_through_every_command(table):
    succeed("train", table, "--out", "run")
    result = read_result("run/result.json")
    assert result.recipe["task"] == {"name": "table", "args": {"every": 4}}
    assert result.seeds[0].dense > 0.8
    assert [record.unit for record in read_log(Path("run"))] == ["rows"] * 3
    assert all(record.compressed_accuracy > 0.5 for record in read_log(Path("run")))
    before = Path("run", "model.safetensors").read_bytes()
    succeed("train", table, "--out", "again")
    assert Path("again", "model.safetensors").read_bytes() == before

    assert "on the 100 test rows of flowers" in succeed("evaluate", "run").stdout
    succeed("compress", "run", "--to", "obs:m4@global:0.5", "--json", "found.json")
    succeed("export", "run", "--to", "global:0.5", "--out", "files")
    (path,) = Path("files").iterdir()
    assert "accuracy" in succeed("evaluate", "run", "--model", path).stdout
    succeed("bench", "run", "--to", "global:0.5", "--batch", 8, "--rounds", 1, "--engines", "torch")
    succeed("finetune", "run", "--at", "global:0.5", "--epochs", 1, "--out", "tuned")
    succeed("sweep", table, "--grid", "cram.rho=0,0.05", "--epochs", 1, "--out", "swept")
    assert "task.name: table" in succeed("list", "tasks").stdout

    rows = numpy.loadtxt("data/flowers.csv", delimiter=",")
    numpy.savetxt("data/flowers.csv", rows[::-1], delimiter=",")
    assert "the run was trained on other data: contents" in fail("compress", "run")


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["task.name=tables"], "task.name is 'tables' (did you mean 'table'?); allowed: "),
        (["text={task: sst2}"], "text is given; allowed: null, as there is a section task"),
        (["train.early_stopping={}"], "train.early_stopping is for texts; allowed for rows: null"),
        (["model.args={inputs: 3}"], "does not take the inputs of 'flowers', (2,) each"),
    ],
)
def test_what_does_not_go_with_a_task_is_refused(table, sets, message):
    options = [word for text in sets for word in ("--set", text)]
    assert message in fail("train", table, *options, code=1)


def test_a_task_is_registered_once_and_by_a_task():
    with pytest.raises(ValueError, match="is not a subclass of Task"):
        register_task("mine")(dict)
    with pytest.raises(ValueError, match="'texts' is taken by torchcram itself"):
        register_task("texts")(ImageClassification)


def test_the_method_of_the_guide_trains(tmp_path, monkeypatch):
    page = ROOT / "docs" / "extending.md"
    (code,) = [block for block in blocks(page) if "class Cut" in block]
    code = code.partition("\n\nmodel = ")[0]  # the class alone
    points = "[torchcram.methods]\nmy-cut = my_cut\nbroken = broken_module\n"
    modules = {"my_cut": code, "broken_module": "import not_installed"}
    install(tmp_path / "packages", monkeypatch, entry_points=points, **modules)
    (section,) = [block for block in yaml_blocks(page.read_text()) if "my-cut" in block]
    Path("mine.yaml").write_text(section)
    succeed("train", "mine.yaml", "--epochs", 1, "--out", "run", "--set", "compress.to=[nm:2:4]")
    result = read_result("run/result.json")
    assert result.title == "Cut, trained for 2:4"
    assert result.seeds[0].targets[0].sparsity > 0.4
    rows = {row["method"]: row for row in json.loads(succeed("list", "methods", "--json").stdout)}
    assert rows["my-cut"]["arguments"] == "at"
    assert rows["my-cut"]["what_it_does"].startswith("Prunes once by magnitude")
    assert "cannot be imported: ModuleNotFoundError" in rows["broken"]["what_it_does"]
    line = fail("train", "mine.yaml", "--set", "method.args={at: 40 epochs}", "--epochs", 1, code=1)
    assert "at must be below the 22 steps of the training, got 880" in line
