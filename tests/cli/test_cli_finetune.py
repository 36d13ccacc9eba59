import json
import shutil
from pathlib import Path

import pytest
import torch
from commands import SGD, command, fail, succeed

from torchcram import compressible_weights, sparsity
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import load_trained

CPU = torch.device("cpu")


def test_finetuning_keeps_the_zeros_and_tells_the_way(run):
    done = succeed("finetune", run, "--at", "global:0.9", "--epochs", 2)
    folder = run.with_name("seed0-finetune-global-0.9")
    assert done.stdout.splitlines()[-1] == f"run: {folder}"
    model = load_trained(folder, CPU).model
    assert sparsity(compressible_weights(model)) == pytest.approx(0.9, abs=1e-3)
    origin = json.loads((folder / "start.json").read_text())
    shown = [line for line in done.stdout.splitlines() if line.startswith("│")]
    for line, what, value in zip(
        shown,
        (
            "as it was trained",
            "compressed to global:0.9",
            "batch norm tuned",
            "fine-tuned, 2 epochs",
        ),
        (
            origin["dense"],
            origin["before"],
            origin["after"],
            read_run(folder)[1].finished.accuracy,
        ),
        strict=True,
    ):
        assert what in line
        assert f"{100 * value:.2f}" in line
    assert "90.00" in shown[-1]
    recipe = read_run(folder)[0]
    assert recipe.name == f"{SGD}-finetune-global-0.9"
    assert (recipe.optimizer.lr, recipe.cram) == (0.02, None)


def test_stopped_finetuning_continues(run, monkeypatch):
    line = ["finetune", run, "--at", "global:0.8", "--epochs", 3]
    real, steps = EagerStep.run, 0
    succeed(*line, "--out", "whole")

    def interrupted(self):
        nonlocal steps
        steps += 1
        if steps == 30:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(EagerStep, "run", interrupted)
    assert command(*line, "--out", "stopped").exit_code == 130
    done = succeed(*line, "--out", "stopped")
    assert "fine-tuning: 3 epochs, continued after 1" in done.stderr
    one, other = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert one == other


def test_dense_finetuning_by_another_method_ends_with_a_table(run):
    changes = ["--set", "cram.operators=[global:0.9]", "--set", "cram.rho=0.1"]
    done = succeed("finetune", run, "--at", "dense", "--epochs", 1, *changes, "--out", "dense")
    assert "│ global:0.9 " in done.stdout
    assert "batch norm tuned" not in done.stdout
    assert Path("dense", "result.json").exists()
    assert read_run(Path("dense"))[0].cram.rule == "CrAM+"


def test_transfer_builds_a_new_head(run):
    done = succeed("transfer", run, "--at", "global:0.9", "--to", SGD, "--epochs", 1)
    folder = run.with_name("seed0-transfer-global-0.9-digits-convnet-digits-sgd")
    assert done.stdout.splitlines()[-1] == f"run: {folder}"
    assert "│ transferred, 1 epoch " in done.stdout
    weights = dict(load_trained(folder, CPU).model.named_parameters())
    assert sparsity({"fc": weights["fc.weight"]}) == 0
    body = {name: weights[name] for name in weights if name.endswith("weight") and "fc" not in name}
    assert sparsity({name: w for name, w in body.items() if w.dim() == 4}) > 0.85


@pytest.mark.parametrize("at", ["int4", "global:0.8+int4"])
def test_what_training_would_undo_is_refused(run, at):
    line = fail("finetune", run, "--at", at, "--out", "new")
    assert f"{at} does more than set weights to zero" in line
    assert not Path("new").exists()


def test_bad_input_is_a_line(run):
    assert "cannot read 'half'" in fail("finetune", run, "--at", "half")
    assert "is a range" in fail("finetune", run, "--at", "global:0.3-0.9")
    assert "nowhere is not the folder of a run" in fail("finetune", "nowhere", "--at", "global:0.9")
    assert "no known key" in fail("finetune", run, "--at", "dense", "--set", "train.epoch=1")
    both = ["--epochs", 1, "--set", "train.epochs=2"]
    assert "--epochs and train.epochs exclude" in fail("finetune", run, "--at", "dense", *both)
    line = fail("transfer", run, "--at", "dense", "--to", SGD, *both)
    assert "--epochs and train.epochs exclude" in line
    assert "there is no recipe 'x/y'" in fail("transfer", run, "--at", "dense", "--to", "x/y")
    assert "holds another run" in fail("finetune", run, "--at", "global:0.9", "--out", run)
    assert command("finetune", run).exit_code == 2
    assert [path.name for path in run.parent.iterdir()] == ["seed0"]


def test_results_of_another_recipe_are_refused_before_the_training(run, tmp_path):
    seven = shutil.copytree(run, tmp_path / "seed7")
    info = json.loads((seven / "run.json").read_text())
    (seven / "run.json").write_text(json.dumps({**info, "seed": 7}))
    order = ("finetune", seven, "--at", "global:0.9", "--results", tmp_path / "results")
    succeed(*order, "--epochs", 1, "--out", tmp_path / "one")
    for options, seed in (((), 7), (("--seed", 4), 4)):
        message = fail(*order, "--epochs", 2, *options, "--out", tmp_path / "two")
        assert f"seed {seed} was trained with another recipe than the earlier seeds" in message
    assert not (tmp_path / "two").exists()
