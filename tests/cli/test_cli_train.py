import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from commands import CRAM, SGD, command, fail, succeed

from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.steps import EagerStep

ONE = ["--set", "compress.to=[global:0.9]"]  # target, to be quick


def test_one_line_ends_with_a_model_a_table_and_a_result():
    done = succeed("train", CRAM, "--epochs", 2, "--seed", 3)
    folder = Path("runs", CRAM, "seed3")
    recipe, info = read_run(folder)
    assert (info.seed, recipe.train.epochs, recipe.cram.rule) == (3, 2, "CrAM+")
    assert (folder / "model.safetensors").stat().st_size > 10_000
    result = read_result(folder / "result.json")
    (seed,) = result.seeds
    assert [target.operator for target in seed.targets] == list(recipe.compress.to)
    assert all(f"│ {target} " in done.stdout for target in recipe.compress.to)
    assert f"{100 * seed.dense:.2f}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"run: {folder}"
    lines = done.stderr.splitlines()
    assert lines[0] == "cram-plus-multi seed 3: 2 epochs"
    assert [line.split(",")[0] for line in lines[1:3]] == [
        "cram-plus-multi seed 3: epoch 1 of 2",
        "cram-plus-multi seed 3: epoch 2 of 2",
    ]


def test_a_finished_run_only_shows_its_table(monkeypatch):
    one = succeed("train", SGD, "--epochs", 1, *ONE)
    before = Path("runs", SGD, "seed0", "result.json").stat().st_mtime_ns

    def no_work(*_args, **_options):
        raise AssertionError("nothing is to be computed")

    monkeypatch.setattr("torchcram.experiments.results_store.one_shot", no_work)
    monkeypatch.setattr("torchcram.experiments.training.trainer.Trainer.fit", no_work)
    again = succeed("train", SGD, "--epochs", 1, *ONE)
    assert again.stdout == one.stdout
    assert again.stderr == ""
    assert Path("runs", SGD, "seed0", "result.json").stat().st_mtime_ns == before


def test_other_targets_are_measured_without_training_again(monkeypatch):
    succeed("train", SGD, "--epochs", 1, *ONE)
    monkeypatch.setattr("torchcram.experiments.training.trainer.Trainer.fit", None)
    done = succeed("train", SGD, "--epochs", 1, "--set", "compress.to=[int4]")
    assert "│ int4 " in done.stdout
    assert "global:0.9" not in done.stdout


def test_ctrl_c_says_how_to_continue_and_the_same_line_does(monkeypatch):
    line = ["train", CRAM, "--epochs", 4, *ONE]
    succeed(*line, "--out", "whole")
    steps = 0
    real = EagerStep.run

    def interrupted(self):
        nonlocal steps
        steps += 1
        if steps == 50:  # in the third epoch
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(EagerStep, "run", interrupted)
    done = command(*line, "--out", "stopped")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "stopped; the same command continues where it was"
    assert not Path("stopped", "model.safetensors").exists()
    done = succeed(*line, "--out", "stopped")
    assert done.stderr.splitlines()[0] == "cram-plus-multi seed 0: 4 epochs, continued after 2"
    one, other = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert one == other
    assert [record.epoch for record in read_log(Path("stopped"))] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_a_real_ctrl_c_ends_a_process():
    child = subprocess.Popen(
        [sys.executable, "-m", "torchcram", "train", SGD, "--epochs", "10000", "--out", "run"],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        late = time.monotonic() + 60
        while not list(Path("run").glob("checkpoints/*.pt")):
            assert child.poll() is None, child.stderr.read()
            assert time.monotonic() < late
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130
    assert errors.splitlines()[-1] == "stopped; the same command continues where it was"
    assert "Traceback" not in errors


def test_epochs_also_limit_the_warmup(tmp_path):
    text = f"extends: {SGD}\nname: a/b/c\nschedule: {{warmup_epochs: 5}}\n"
    (tmp_path / "mine.yaml").write_text(text)
    succeed("train", "mine.yaml", "--epochs", 1, *ONE)
    recipe = yaml.safe_load(Path("runs/a/b/c/seed0/recipe.yaml").read_text())
    assert (recipe["train"]["epochs"], recipe["schedule"]["warmup_epochs"]) == (1, 1)
    succeed("train", "mine.yaml", "--epochs", 6, *ONE, "--seed", 1)
    recipe = yaml.safe_load(Path("runs/a/b/c/seed1/recipe.yaml").read_text())
    assert recipe["schedule"]["warmup_epochs"] == 5


def test_seeds_of_a_recipe_come_one_after_another_and_together():
    done = succeed("train", SGD, "--epochs", 1, "--seed", 0, "--seed", 4, *ONE, "--out", "all")
    assert done.stdout.count("│ dense ") == 3
    assert "over 2 seeds" in done.stdout
    for seed in (0, 4):
        assert read_run(Path("all", SGD, f"seed{seed}"))[1].seed == seed


def test_several_lengths_are_runs_with_names_of_their_own():
    lengths = ["--epochs", 1, "--epochs", 2]
    done = succeed("train", SGD, *lengths, "--seed", 0, *ONE, "--results", "results")
    for epochs in (1, 2):
        name = f"{SGD}-{epochs}-epochs"
        result = read_result(f"results/{name}.json")
        assert (result.recipe["name"], result.recipe["train"]["epochs"]) == (name, epochs)
        assert result.title == f"SGD, {epochs} epoch" + "s" * (epochs - 1)
        assert len(read_log(Path("runs", name, "seed0"))) == epochs
        assert f"sgd-{epochs}-epochs seed 0: epoch {epochs} of {epochs}" in done.stderr
    assert not Path("runs", SGD).exists()
    assert "is given twice" in fail("train", SGD, "--epochs", 2, "--epochs", 2, *ONE)
    assert "exclude" in fail("train", SGD, *lengths, "--set", "train.epochs=1")


def test_results_are_collected_from_all_runs():
    for seed in (1, 0, 1):
        succeed("train", SGD, "--epochs", 1, "--seed", seed, *ONE, "--results", "results")
    result = read_result(f"results/{SGD}.json")
    assert [one.seed for one in result.seeds] == [0, 1]
    assert [path.name for path in Path("results").rglob("*")] == [
        "digits",
        "convnet-digits",
        "sgd.json",
    ]
    line = fail("train", SGD, "--epochs", 2, "--seed", 2, *ONE, "--results", "results")
    assert "differ in train.epochs" in line
    assert not Path("runs", SGD, "seed2").exists()


def test_it_can_start_from_a_finished_run(finished):
    done = succeed("train", CRAM, "--epochs", 1, "--from", finished, "--out", "on", *ONE)
    first = read_log(Path("on"))[0]
    assert first.loss < read_log(finished)[0].loss / 2
    assert read_run(Path("on"))[1].start is not None
    assert "cram-plus-multi" in done.stdout
    assert "start is " in fail("train", CRAM, "--epochs", 1, "--out", "on", *ONE)


def test_without_epochs_it_compresses_what_it_would_start_from(finished):
    done = succeed("train", CRAM, "--epochs", 0, *ONE, "--from", finished, "--out", "as-it-is")
    assert "trained for 0 epochs, 0 passes" in " ".join(done.stdout.split())
    folder = Path("as-it-is")
    model = "model.safetensors"
    assert (folder / model).read_bytes() == (Path(finished) / model).read_bytes()
    before, after = (read_run(path)[1].finished for path in (Path(finished), folder))
    assert after.accuracy == before.accuracy
    assert read_log(folder) == []
    assert [target.operator for target in read_result(folder / "result.json").seeds[0].targets] == [
        "global:0.9"
    ]
    succeed("report", folder)
    succeed("finetune", folder, "--at", "global:0.9", "--epochs", 1)


def test_what_it_starts_from_has_to_be_the_same_model(finished):
    line = fail("train", "cifar10/resnet20/sgd", "--from", finished, "--set", "data.name=digits")
    assert "its model is 'convnet-digits', that of cifar10/resnet20/sgd is 'resnet20'" in line
    line = fail("train", SGD, "--from", "nowhere")
    assert "nowhere is not the folder of a run" in line
    assert not Path("runs").exists() or not list(Path("runs").rglob("run.json"))


def test_json_progress_is_all_that_standard_output_has():
    done = succeed("train", SGD, "--epochs", 2, "--progress", "json", *ONE)
    news = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["record"]["epoch"] for one in news if one["record"]] == [1, 2]
    assert (news[0]["done"], news[0]["epochs"], news[-1]["done"]) == (0, 2, 2)
    assert done.stderr == ""


def test_eager_steps_are_asked_for(monkeypatch):
    def no_fast(*_, compiled, **__):
        raise AssertionError(f"--eager was given, compiled={compiled}")

    monkeypatch.setattr("torchcram.experiments.training.cuda_graph_steps.make_step", no_fast)
    succeed("train", SGD, "--epochs", 1, "--eager", *ONE)
    assert isinstance(command("train", SGD, "--epochs", 1, "--seed", 1).exception, AssertionError)


def test_compiling_is_for_a_gpu():
    done = succeed("train", SGD, "--compile", "--device", "cpu", "--epochs", 1, "--out", "run")
    assert "--compile has no effect on a CPU" in done.stderr


def test_eager_and_compiled_steps_exclude_each_other():
    assert "--eager and --compile" in fail("train", SGD, "--eager", "--compile")


def test_the_eval_interval():
    succeed("train", SGD, "--epochs", 3, "--eval-interval", 2, "--out", "run", *ONE)
    assert [record.accuracy is None for record in read_log(Path("run"))] == [True, False, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["digits/convnet-digits/sdg"], "did you mean 'digits/convnet-digits/sgd'?"),
        (["missing.yaml"], "missing.yaml"),
        ([SGD, "--set", "cram.rho"], "allowed is KEY=VALUE"),
        ([SGD, "--set", "optimizer.lrr=0.1"], "optimizer.lrr is no known key"),
        ([SGD, "--device", "gpu"], "allowed are auto, cpu, cuda"),
        ([SGD, "--device", "mps"], "allowed are auto, cpu, cuda"),
        ([SGD, "--device", "cuda:77"], "--device cuda:77: torch finds"),
        ([SGD, "--set", "train.epochs=2", "--epochs", "1"], "--epochs and train.epochs exclude"),
        ([SGD, SGD], "is given twice"),
        ([SGD, "--jobs", "2"], "--jobs needs --parallel"),
        (["cifar10/resnet20/sgd"], "'cifar10' is not in data"),
        (["cifar10/resnet20/sgd"], "download it (--download"),
        ([SGD, "--set", "optimizer.lr=1e30", "--epochs", "1"], "the training loss is"),
    ],
)
def test_bad_input_is_a_line_and_leaves_nothing(arguments, said):
    line = fail("train", *arguments)
    assert said in line
    assert not list(Path().rglob("*.safetensors"))
    assert not list(Path().rglob("result.json"))
    assert not [path for path in Path().rglob("*") if path.name.endswith(".tmp")]


def test_the_folder_of_another_run_is_named(run):
    line = fail("train", SGD, "--epochs", 7, "--out", run)
    assert f"{run} holds another run: recipe.train.epochs is 3, not 7" in line
    assert line.endswith("; choose another folder (--out)")


def test_the_data_folder_is_in_the_environment(monkeypatch):
    monkeypatch.setenv("TORCHCRAM_DATA", "elsewhere")
    assert "is not in elsewhere" in fail("train", "cifar10/resnet20/sgd")
    assert "is not in there" in fail("train", "cifar10/resnet20/sgd", "--data", "there")
