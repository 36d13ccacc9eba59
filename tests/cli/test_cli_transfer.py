"""Transfers of several runs, at several sparsities, to several tasks."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import CRAM, SGD, command, fail, succeed
from PIL import Image
from runs import one_thread

from torchcram import sparsity
from torchcram.experiments import transfer
from torchcram.experiments.evaluation.results import read_result, read_results
from torchcram.experiments.training.parallel import Failure
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import load_trained

CPU = torch.device("cpu")
ONE = ["--set", "compress.to=[global:0.9]", "--epochs", 1]
DPF = "digits/convnet-digits/dpf"
METHOD = "method={name: dpf, target: 'global:0.9', args: {end: 50 %, interval: 2}}"
TASKS = """
base: {extends: digits/convnet-digits/sgd, train: {epochs: 1}, compress: {to: [global:0.9]}}
methods: {unused: {title: Unused}}
variants:
  near/convnet-digits: {methods: [unused]}
  other/convnet-digits: {methods: [unused], train: {batch_size: 32}}
"""
NEAR, OTHER = (f"tasks.yaml:{task}/convnet-digits/unused" for task in ("near", "other"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Runs by SGD, CrAM+ and a method, at the paths `sgd`, `cram` and `dpf`."""
    folder = tmp_path_factory.mktemp("trained")
    with one_thread():
        succeed("train", SGD, *ONE, "--out", folder / "sgd")
        succeed("train", CRAM, *ONE, "--out", folder / "cram")
        method = ["--set", METHOD, "--set", f"name={DPF}", "--set", "title=DPF"]
        succeed("train", SGD, *ONE, *method, "--out", folder / "dpf")
    return folder


@pytest.fixture(autouse=True)
def _sources(trained, tmp_path):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    Path("tasks.yaml").write_text(TASKS)


def test_every_source_sparsity_and_task_is_a_run_and_a_result():
    line = ["transfer", "sgd", "cram", "--at", "dense", "--at", "global:0.9", "--to", NEAR]
    line += ["--to", OTHER, "--lr", 0.3, "--out", "moved", "--results", "results"]
    done = succeed(*line, "--json", "summary.json")
    results = read_results("results")
    assert {f"{result.task}/{result.method}" for result in results} == {
        f"{task}/unused-of-{method}-{at}"
        for task in ("near", "other")
        for method in ("sgd", "cram-plus-multi")
        for at in ("dense", "global-0.9")
    }
    accuracy = {
        (source.recipe, source.at, source.target.split("/")[0]): result.seeds[0].dense
        for result in results
        for source in [result.seeds[0].source]
    }
    summary = json.loads(Path("summary.json").read_text())
    assert summary["tasks"] == ["near", "other"]
    for row in summary["rows"]:
        increases = []
        for cell in row["tasks"]:
            error = 1 - accuracy[row["source"], row["at"], cell["task"]]
            dense = 1 - accuracy[row["source"], "dense", cell["task"]]
            assert cell["error"] == pytest.approx(error)
            assert cell["increase"] == pytest.approx((error - dense) / dense)
            increases.append((error - dense) / dense)
        assert row["mean"] == pytest.approx(sum(increases) / 2)
    assert len(summary["rows"]) == 4
    runs = [line[5:] for line in done.stdout.splitlines() if line.startswith("run: ")]
    assert len(set(runs)) == 8
    before = {run: Path(run, "model.safetensors").stat().st_mtime_ns for run in runs}
    again = succeed(*line)
    assert "epoch 1 of 1" not in again.stderr  # nothing is trained again
    assert {run: Path(run, "model.safetensors").stat().st_mtime_ns for run in runs} == before
    table = [line for line in done.stdout.splitlines() if line.startswith("│")]
    for shown in (again, succeed("transfers"), succeed("transfers", "moved")):
        rows = [line for line in shown.stdout.splitlines() if line.startswith("│")]
        assert sorted(rows) == sorted(table)
    assert succeed("transfers", "--markdown").stdout.startswith(
        "| source | at | `near` | `other` |"
    )
    text = "<!-- results:transfer digits/convnet-digits sgd absent -->\n<!-- end results -->\n"
    Path("page.md").write_text(text)
    succeed("results", "--write", "page.md")
    page = Path("page.md").read_text()
    assert "| SGD | `global:0.9` |" in page
    assert "| `absent` | not run yet |" in page
    assert "CrAM" not in page
    succeed("results")


def test_the_learning_rate_is_chosen_on_training_images_alone():
    line = ["transfer", "sgd", "--at", "global:0.9", "--to", SGD, "--epochs", 1]
    done = succeed(*line, "--lr", 0.02, "--lr", 0.3, "--results", "results", "--out", "moved")
    scores = {}
    for lr in ("0.02", "0.3"):
        folder = Path("moved", "trials", f"optimizer.lr={lr}")
        recipe, info = read_run(folder)
        assert recipe.optimizer.lr == float(lr)
        assert (info.data.train_images, info.data.test_images) == (1295, 142)  # of 1437
        scores[lr] = info.finished.accuracy
        assert f"{100 * scores[lr]:.2f}" in done.stdout
        names = {path.name for path in folder.iterdir()}
        assert not names & {"model.safetensors", "start.safetensors", "checkpoints"}
    best = max(scores, key=scores.get)
    recipe, info = read_run(Path("moved"))
    assert recipe.optimizer.lr == float(best)
    assert (info.data.train_images, info.data.test_images) == (1437, 360)
    path = Path("results/digits/convnet-digits/sgd-of-sgd-global-0.9.json")
    (seed,) = read_result(path).seeds
    assert seed.chosen == (f"optimizer.lr={best}",)
    assert seed.dense == info.finished.accuracy
    assert read_result(path).recipe["optimizer"]["lr"] == 0.2  # that of the target's recipe
    # on the tests of another split, the choice is another one: it is not that of the test images
    other = "0.02" if best == "0.3" else "0.3"
    info = json.loads(Path("moved/trials", f"optimizer.lr={other}", "run.json").read_text())
    info["finished"]["accuracy"] = 1.0
    Path("moved/trials", f"optimizer.lr={other}", "run.json").write_text(json.dumps(info))
    shutil.copytree("moved/trials", "again/trials")
    succeed(*line, "--lr", 0.02, "--lr", 0.3, "--out", "again")
    assert read_run(Path("again"))[0].optimizer.lr == float(other)


def test_a_learning_rate_or_a_transfer_that_fails_is_left_out(monkeypatch):
    line = ["transfer", "sgd", "--at", "dense", "--to", NEAR, "--out", "moved"]
    done = succeed(*line, "--lr", 0.1, "--lr", 1e30)
    assert "failed" in done.stdout
    assert read_run(Path("moved"))[0].optimizer.lr == 0.1
    said = fail("transfer", "sgd", "--at", "dense", "--to", NEAR, "--lr", 1e30, "--lr", 1e31)
    assert "every training failed" in said
    line = ["transfer", "sgd", "--at", "dense", "--to", NEAR, "--to", OTHER, "--out", "two"]
    folder = Path("two/digits-convnet-digits-sgd-seed0/dense-other-convnet-digits-unused")
    succeed(*line)
    shutil.rmtree(folder)
    real = transfer.finetune

    def failing(run, at, out, **options):
        if out == folder:
            raise FloatingPointError("the loss is infinite")
        return real(run, at, out, **options)

    monkeypatch.setattr(transfer, "finetune", failing)
    done = command(*line)
    assert done.exit_code == 1
    assert "error: sgd seed 0, dense, to other: the loss is infinite" in done.stderr
    assert "│ SGD    │ dense │" in done.stdout


def test_a_start_that_was_not_written_to_its_end_is_written_anew():
    trial = Path("moved", "trials", "optimizer.lr=0.1")
    trial.mkdir(parents=True)
    (trial / "start.safetensors").write_bytes(b"start.json is missing")
    line = ["transfer", "sgd", "--at", "dense", "--to", NEAR, "--lr", 0.1, "--lr", 0.2]
    succeed(*line, "--out", "moved")
    starts = [read_run(path)[1].start for path in Path("moved", "trials").iterdir()]
    assert len(starts) == 2
    assert len(set(starts)) == 1


def test_stopped_and_continued_is_bit_for_bit_the_same(monkeypatch):
    line = ["transfer", "sgd", "--at", "global:0.9", "--to", SGD, "--epochs", 2]
    line += ["--lr", 0.1, "--lr", 0.3, "--set", "train.batch_size=144", "--out"]
    steps = []
    real = EagerStep.run

    def counted(self):
        steps.append(self)
        if len(steps) == stop:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(EagerStep, "run", counted)
    stop = None
    succeed(*line, "whole")
    total = len(steps)
    assert total == 2 * (8 + 8 + 9)  # of two trials and of the training on all images

    def continued(out):
        nonlocal stop
        stop = None
        succeed(*line, out)
        for name in ("model.safetensors", "start.safetensors"):
            assert Path(out, name).read_bytes() == Path("whole", name).read_bytes()
        for trial in ("optimizer.lr=0.1", "optimizer.lr=0.3"):
            infos = [read_run(Path(folder, "trials", trial))[1] for folder in (out, "whole")]
            assert infos[0].start == infos[1].start
            assert infos[0].finished.accuracy == infos[1].finished.accuracy
            assert not Path(out, "trials", trial, "model.safetensors").exists()

    for at in (5, 28, 45):  # in the first trial, the second, and the last training
        steps.clear()
        stop = at
        assert command(*line, f"stopped{at}").exit_code == 130
        continued(f"stopped{at}")
        assert len(steps) <= total + 9  # at most an epoch is trained again
    remove, removed = transfer._remove_weights, []

    def interrupted(folder):
        removed.append(folder)
        if len(removed) == 2:
            raise KeyboardInterrupt
        remove(folder)

    monkeypatch.setattr(transfer, "_remove_weights", interrupted)
    assert command(*line, "removing").exit_code == 130
    continued("removing")


def test_a_run_that_a_method_trained_keeps_its_zeros_and_is_compared_with_the_plain_one(
    monkeypatch,
):
    def run_in_turn(jobs, on_line, *, at_once, environment):
        assert at_once <= 2
        assert "OMP_NUM_THREADS" in environment
        for job in jobs:
            assert job.command[1:3] == ("-m", "torchcram")
            for line in succeed(*job.command[3:]).stdout.splitlines():
                on_line(job, line)
        return []

    monkeypatch.setattr("torchcram.experiments.training.parallel.run_jobs", run_in_turn)
    line = ["transfer", "sgd", "dpf", "--to", NEAR, "--parallel", "--device", "cpu"]
    done = succeed(*line, "--json", "summary.json", "--results", "results")
    rows = json.loads(Path("summary.json").read_text())["rows"]
    assert [(row["title"], row["at"], row["dense"]) for row in rows] == [
        ("SGD", "dense", SGD),
        ("DPF", "global:0.9", SGD),
    ]
    assert rows[1]["mean"] is not None
    folder = Path("dpf-transfer-global-0.9-near-convnet-digits-unused")
    assert f"run: {folder}" in done.stdout
    before = dict(load_trained(Path("dpf"), CPU).model.named_parameters())
    after = dict(load_trained(folder, CPU).model.named_parameters())
    masked = [name for name, value in before.items() if value.dim() == 4]
    assert masked
    for name in masked:
        assert torch.equal(before[name] != 0, after[name] != 0)
    assert sparsity({"fc": after["fc.weight"]}) == 0
    assert "dpf seed 0, global:0.9, to near: epoch 1 of 1" in done.stderr
    assert len(read_results("results")) == 2
    # the same by --dense, from the runs that are there
    line = ["transfer", "dpf", "--at", "global:0.9", "--to", NEAR, "--dense", "sgd"]
    again = succeed(*line, "--json", "again.json")
    assert json.loads(Path("again.json").read_text())["rows"] == rows
    assert "epoch 1 of 1" not in again.stderr


def test_a_class_folder_is_a_task(tmp_path):
    for split in ("train", "test"):
        for label, color in (("cat", 90), ("dog", 160)):
            for number in range(10):
                path = tmp_path / "data" / "pets" / split / label / f"{number}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (8, 8), (color, number, 0)).save(path)
    Path("net.py").write_text(
        "from torch import nn\n"
        "def net(num_classes):\n"
        "    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),\n"
        "        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))\n"
    )
    Path("mine.yaml").write_text(
        "extends: digits/convnet-digits/sgd\nmodel: {name: ./net.py:net}\n"
        "data: {color: true, image_size: 8}\n"
    )
    Path("pets.yaml").write_text(
        "extends: mine.yaml\ntitle: Pets\ndata: {name: pets, image_size: 8}\n"
        "train: {batch_size: 8}\n"
    )
    succeed("train", "mine.yaml", *ONE, "--out", "mine")
    succeed(
        "transfer", "mine", "--at", "global:0.5", "--to", "pets.yaml", "--epochs", 1, "--out", "x"
    )
    assert read_run(Path("x"))[1].data.classes == ("cat", "dog")
    said = fail("transfer", "sgd", "--at", "dense", "--to", "pets.yaml", "--out", "y")
    assert "model 'convnet-digits' does not take the images of 'pets', 3x8x8" in said
    assert not Path("y").exists()


@pytest.mark.parametrize(
    ("arguments", "said", "code"),
    [
        (["sgd", "--to", NEAR], "--at is missing", 2),
        (["sgd", "--at", "dense", "--at", "dense", "--to", NEAR], "allowed once", 2),
        (["sgd", "--at", "dense", "--to", NEAR, "--lr", 0], "--lr 0.0: allowed", 2),
        (["sgd", "--at", "dense", "--to", NEAR, "--lr", 1, "--lr", 1], "allowed once", 2),
        (["sgd", "--at", "dense", "--to", NEAR, "--jobs", 2], "--jobs needs --parallel", 2),
        (["sgd", "--at", "dense", "--to", NEAR, "--dense", "cram"], "--dense is for runs", 2),
        (
            ["sgd", "--at", "dense", "--to", NEAR, "--lr", 1, "--set", "optimizer.lr=2"],
            "exclude each other",
            2,
        ),
        (
            ["sgd", "nowhere", "--at", "dense", "--to", NEAR],
            "nowhere is not the folder of a run",
            1,
        ),
        (["sgd", "--at", "dense", "--to", NEAR, "--to", "x/y/z"], "there is no recipe 'x/y/z'", 1),
        (
            ["sgd", "--at", "dense", "--at", "int4", "--to", NEAR],
            "more than set weights to zero",
            1,
        ),
        (["sgd", "--at", "trained", "--to", NEAR], "has no zeros of its own", 1),
        (["sgd", "dpf", "--at", "global:0.8", "--to", NEAR], "global:0.8 is not what it was", 1),
        (["sgd", "dpf", "--at", "dense", "--to", NEAR], "allowed: global:0.9, or no --at", 1),
        (["dpf", "--to", NEAR], "name one by --dense RUN", 1),
        (["dpf", "--to", NEAR, "--dense", "dpf"], "these fit: none of the runs", 1),
        (["sgd", "sgd", "--at", "dense", "--to", NEAR, "--to", "tasks.yaml"], "several recipes", 1),
        (["sgd", "other", "--at", "dense", "--to", NEAR], "have the same name", 1),
        (["sgd", "half", "--at", "dense", "--to", NEAR], "half: the training is not finished", 1),
        (
            ["sgd", "--at", "dense", "--to", NEAR, "--set", METHOD],
            "chooses zeros of its own",
            1,
        ),
        (
            ["sgd", "--at", "dense", "--to", NEAR, "--to", "digits/resnet18-64/transfer"],
            "does not take the images of 'digits', 3x64x64",
            1,
        ),
        (["sgd", "--at", "dense", "--to", NEAR, "--to", "sst2/minilm-l6/adam"], "allowed", 1),
    ],
)
def test_bad_input_is_a_line_before_any_training(arguments, said, code, monkeypatch):
    shutil.copytree("sgd", "other")
    shutil.copytree("sgd", "half")
    Path("half", "model.safetensors").unlink()
    monkeypatch.setattr(EagerStep, "run", lambda _: pytest.fail("it trains"))
    before = sorted(path.name for path in Path().iterdir())
    assert said in fail("transfer", *arguments, code=code)
    assert sorted(path.name for path in Path().iterdir()) == before


def test_folders_of_other_runs_are_refused_before_any_training(monkeypatch):
    line = ["transfer", "sgd", "--to", NEAR, "--out"]
    succeed(*line, "moved", "--at", "global:0.5")
    monkeypatch.setattr(EagerStep, "run", lambda _: pytest.fail("it trains"))
    assert "moved holds another run" in fail(*line, "moved", "--at", "global:0.9")
    Path("empty").mkdir()
    assert "has no result of a transfer" in fail("transfers", "empty")
    assert "has no result of a transfer" in fail("transfers", "sgd")


def test_a_failure_in_parallel_is_told_and_the_others_are_shown(monkeypatch):
    line = ["transfer", "sgd", "--at", "dense", "--at", "global:0.9", "--to", NEAR]
    succeed(*line)

    def only_the_first(jobs, _heard, *, at_once, environment):  # noqa: ARG001
        return [Failure(jobs[1], 3, ("error: it is broken",))]

    monkeypatch.setattr("torchcram.experiments.training.parallel.run_jobs", only_the_first)
    done = command(*line, "--parallel", "--device", "cpu")
    assert done.exit_code == 1
    assert "error: sgd seed 0, global:0.9, to near ended with exit status 3:" in done.stderr
    assert "│ SGD    │ dense │" in done.stdout
    assert "global:0.9" not in done.stdout.partition("run: ")[0]
