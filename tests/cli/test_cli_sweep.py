import json
import shlex
from pathlib import Path

import pytest
from commands import CRAM, SGD, fail, succeed

from torchcram.cli import app
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.training.run_folder import read_run

ONE = ["--set", "compress.to=[global:0.5]"]


def test_the_better_of_two_is_found_and_said_how_to_train():
    line = ["sweep", SGD, "--grid", "optimizer.lr=0.0001,0.1", "--epochs", 2, *ONE]
    done = succeed(*line, "--score", "global:0.7")
    folder = Path("runs", SGD, "sweep")
    found = json.loads((folder / "sweep.json").read_text())
    assert found["best"] == ["optimizer.lr=0.1"]
    assert found["score"] == ["global:0.7"]
    best, other = found["points"]
    assert best["score"] == best["targets"]["global:0.7"] > other["score"]
    assert best["targets"].keys() == {"global:0.5", "global:0.7"}
    for point in found["points"]:
        _, info = read_run(folder / point["folder"])
        assert (info.data.train_images, info.data.test_images) == (1295, 142)  # of 1437 to train on
    rows = [row for row in done.stdout.splitlines() if row.startswith("│")]
    assert "optimizer.lr=0.1" in rows[0]
    assert f"{100 * best['dense']:.2f}" in rows[0]
    assert f"{100 * best['targets']['global:0.5']:.2f}" in rows[0]
    assert done.stdout.splitlines()[-1] == found["next"]
    words = shlex.split(found["next"])
    assert words[:3] == ["torchcram", "train", SGD]
    succeed("train", SGD, "--epochs", 1, *ONE)  # is not in the way of what is next
    succeed(*words[1:])
    assert read_run(folder / "optimizer.lr=0.1-whole")[0] == load_recipe(
        SGD, ["compress.to=[global:0.5]", "optimizer.lr=0.1", "train.epochs=2"]
    )


def test_a_finished_sweep_trains_nothing_again(monkeypatch):
    line = ["sweep", CRAM, "--grid", "cram.rho=0.05,0.1", "--epochs", 1, *ONE, "--out", "tried"]
    one = succeed(*line)
    monkeypatch.setattr("torchcram.experiments.training.trainer.Trainer.fit", None)
    monkeypatch.setattr("torchcram.experiments.results_store.one_shot", None)
    assert succeed(*line).stdout == one.stdout


def test_all_that_fails_is_an_error():
    line = ["sweep", SGD, "--grid", "optimizer.lr=1e30,1e31", "--epochs", 1, *ONE]
    assert "every training failed; the first: epoch 1: the training loss is" in fail(*line)
    assert not list(Path().rglob("sweep.json"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "cram.rho"], "allowed is KEY=VALUE,VALUE"),
        (["--grid", "optimizer.lr=0.1,0.1"], "a value is given twice"),
        (["--grid", "compress.to=[int4]"], "is the same for all points"),
        (["--grid", "train.epochs=1,2", "--epochs", 3], "--epochs and train.epochs exclude"),
        (["--grid", "optimizer.lr=fast"], "optimizer.lr is 'fast'"),
        (["--grid", "optimizer.lr=0.1", "--score", "best"], "cannot read 'best'"),
    ],
)
def test_bad_input_is_a_line_and_trains_nothing(arguments, said):
    assert said in fail("sweep", SGD, *arguments)
    assert not Path("runs").exists()


def test_it_is_a_command():
    assert "sweep" in {command.callback.__name__ for command in app.registered_commands}
