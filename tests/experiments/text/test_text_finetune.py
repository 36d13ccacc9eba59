from pathlib import Path

import pytest
import torch
from commands import command, fail, succeed
from runs import digits, run
from runs import recipe as digits_recipe
from safetensors.torch import load_file

from torchcram.experiments import finetuning
from torchcram.experiments.evaluation.compressed_models import pruned, score_on_test
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.tasks import Score
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import read_run
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.stop_policy import EarlyStopping, held_out_values
from torchcram.experiments.training.trainer import Epochs, Trainer

pytestmark = pytest.mark.usefixtures("_here")

CRAM = "squad/minilm-l6/cram-plus-multi"
SETS = ["text.length=48", "text.stride=16", "train.batch_size=4", "optimizer.lr=0.01"]
SETS += ["compress.calibration_samples=16"]
QUERY = "model.bert.encoder.layer.1.output.dense.weight"


def options(*sets):
    return [word for one in sets for word in ("--set", one)]


@pytest.fixture(scope="module")
def finished(tiny, questions, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "seed0"
    sets = options(f"model.name={tiny}", "compress.to=[uniform:0.5]", *SETS)
    succeed("train", CRAM, "--data", questions, "--epochs", 3, *sets, "--out", folder)
    return folder


def tuned(folder, questions, out, *words, at="uniform:0.7"):
    given = ["finetune", folder, "--at", at, "--data", questions, "--out", out, *words]
    return [*given, *options("optimizer.lr=0.01")]


def test_texts_are_tested_on_what_is_held_out_and_the_best_is_kept(finished, questions):
    patient = options("train.early_stopping.patience=8")
    done = succeed(*tuned(finished, questions, "on", *patient, "--results", "results"))
    recipe, info = read_run(Path("on"))
    assert (recipe.train.epochs, recipe.compress.watch, recipe.cram) == (2, None, None)
    records = read_log(Path("on"))
    assert [one.epoch for one in records] == list(range(1, 9))
    assert records[0].lr == pytest.approx(0.01, rel=0.01)
    assert records[-1].lr == pytest.approx(0.01 / 8)
    assert info.data == read_run(finished)[1].data  # the whole, not what is left of it
    zeros = load_file("on/model.safetensors")[QUERY] == 0
    assert zeros.float().mean() == pytest.approx(0.7, abs=0.01)
    result = read_result(f"results/{CRAM}-finetune-uniform-0.7.json")
    (seed,) = result.seeds
    (target,) = seed.targets
    assert (target.operator, target.after) == ("uniform:0.7", info.finished.accuracy)
    assert seed.dense == read_run(finished)[1].finished.accuracy
    assert (info.finished.epochs, seed.epochs) == (2.0, 2.0)
    assert "fine-tuned, 2 epochs" in done.stdout
    assert not list(Path("on").glob("best-*"))


@pytest.mark.parametrize("sets", [[], ["train.ema=0.8"]], ids=["weights", "their average"])
def test_it_stops_after_so_many_tests_and_leaves_the_best(finished, questions, monkeypatch, sets):
    values, kept, tested = iter([0.1, 0.5, 0.5, 0.4, 0.2, 0.9]), {}, []
    real = Trainer.save_checkpoint

    def save(self):
        kept[self.done] = {k: v.clone() for k, v in self.eval_model.state_dict().items()}
        assert (self.eval_model is self.model) == (not sets)
        real(self)

    def test(*given, **options):
        tested.append(len(given[2].test))
        return score_on_test(*given, **options)

    monkeypatch.setattr(Epochs, "score", lambda _: Score(next(values), "F1"))
    monkeypatch.setattr(Trainer, "save_checkpoint", save)
    monkeypatch.setattr("torchcram.experiments.training.stop_policy.score_on_test", test)
    done = succeed(*tuned(finished, questions, "on", "--results", "results", *options(*sets)))
    assert held_out_values(Path("on")) == [0.1, 0.5, 0.5, 0.4, 0.2]
    assert "fine-tuned, 1.25 epochs" in done.stdout  # five rounds of a quarter
    (seed,) = read_result(f"results/{CRAM}-finetune-uniform-0.7.json").seeds
    assert seed.epochs == 1.25
    assert tested == [6]  # the test split, once
    for name, value in load_file("on/model.safetensors").items():
        assert value.equal(kept[2][name]), name
    assert not load_file("on/model.safetensors")[QUERY].equal(kept[5][QUERY])


def test_stopped_and_continued_is_the_same_as_not_stopped(finished, questions, monkeypatch):
    patient = options("train.early_stopping.patience=8")
    succeed(*tuned(finished, questions, "whole", *patient))
    taken, real = 0, EagerStep.run

    def interrupted(self):
        nonlocal taken
        taken += 1
        if taken == 6:  # in the second epoch
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(EagerStep, "run", interrupted)
    given = tuned(finished, questions, "stopped", *patient)
    assert command(*given).exit_code == 130
    done = succeed(*given)
    assert "8 epochs, continued after 5" in done.stderr
    one, other = (Path(name, "model.safetensors").read_bytes() for name in ("whole", "stopped"))
    assert one == other
    assert held_out_values(Path("whole")) == held_out_values(Path("stopped"))


def test_a_log_that_is_too_short_is_named(finished, questions, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(EarlyStopping, "finish", lambda *_: interrupted(None))
        assert command(*tuned(finished, questions, "on")).exit_code == 130
    Path("on/log.jsonl").unlink()
    assert "log.jsonl does not have the" in fail(*tuned(finished, questions, "on"))


def test_a_grid_chooses_on_what_is_held_out(finished, questions, monkeypatch):
    values, made = iter([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]), []
    monkeypatch.setattr(Epochs, "score", lambda _: Score(next(values), "F1"))

    def counted(*given, data, **options):
        made.append(len(data.train))
        return pruned(*given, data=data, **options)

    monkeypatch.setattr("torchcram.experiments.evaluation.compressed_models.pruned", counted)
    words = ["--grid", "train.label_smoothing=0,0.2", "--epochs", 1, "--results", "results"]
    done = succeed(*tuned(finished, questions, "grid", *words, at="obs:m8:r2@uniform:0.7"))
    folders = [Path("grid", f"train.label_smoothing={one}") for one in ("0", "0.2")]
    assert f"run: {folders[1]}" in done.stdout
    assert "F1 in % on the held-out samples" in done.stdout
    assert made == [18]  # once for both, and not of the twenty
    starts = [load_file(one / "start.safetensors")[QUERY] for one in folders]
    assert starts[0].equal(starts[1])
    result = read_result(f"results/{CRAM}-finetune-obs-m8-r2-uniform-0.7.json")
    assert result.seeds[0].chosen == ("train.label_smoothing=0.2",)
    assert result.seeds[0].targets[0].operator == "obs:m8:r2@uniform:0.7"


def test_every_seed_may_choose_another_point(finished, questions, monkeypatch):
    values = iter([0.9, 0.1, 0.1, 0.1, 0.5, 0.1, 0.1, 0.1] + 4 * [0.2] + 4 * [0.6])
    monkeypatch.setattr(Epochs, "score", lambda _: Score(next(values), "F1"))
    words = ["--grid", "train.label_smoothing=0,0.2", "--epochs", 1, "--results", "results"]
    for seed in (0, 1):
        given = tuned(finished, questions, f"grid{seed}", *words, "--seed", seed)
        succeed(*given)
    result = read_result(f"results/{CRAM}-finetune-uniform-0.7.json")
    assert result.recipe["train"]["label_smoothing"] == 0.2  # that of the run
    assert [one.chosen for one in result.seeds] == [
        ("train.label_smoothing=0",),
        ("train.label_smoothing=0.2",),
    ]
    other = tuned(finished, questions, "grid2", *words, "--set", "train.batch_size=2")
    assert "they differ in train.batch_size" in fail(*other)
    assert not Path("grid2").exists()  # before the work


def test_a_point_that_fails_fails_alone(finished, questions):
    words = ["--grid", "optimizer.lr=1e30,0.01", "--epochs", 1]
    given = [*tuned(finished, questions, "grid", *words)][:-2]  # without --set optimizer.lr
    done = succeed(*given)
    assert "run: grid/optimizer.lr=0.01" in done.stdout
    assert "failed" in done.stdout
    assert "run: grid/optimizer.lr=0.01" in succeed(*given).stdout  # as often as one likes
    words = ["--grid", "optimizer.lr=1e30,1e31", "--epochs", 1]
    said = fail(*tuned(finished, questions, "all", *words)[:-2])
    assert "every training failed; the first, optimizer.lr=1e+30: " in said


def test_points_are_compared_on_one_part_of_the_same_tokens(finished, questions):
    def refused(grid):
        return fail(*tuned(finished, questions, "grid", "--grid", grid))

    assert "differs between the points" in refused("train.early_stopping.held_out=0.1,0.4")
    assert "text.length is the same for all points" in refused("text.length=48,24")
    assert not Path("grid").exists()
    shorter = options("text.length=24", "text.stride=8")
    assert "on other data" in fail(*tuned(finished, questions, "on"), *shorter)


def test_a_start_that_was_copied_by_half_is_copied_again(finished, questions, monkeypatch):
    words = ["--grid", "train.label_smoothing=0,0.2", "--epochs", 1]
    given = tuned(finished, questions, "grid", *words)
    real = finetuning.write_atomically

    def interrupted(path, content):
        if path.name == "start.json":
            raise KeyboardInterrupt
        real(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(finetuning, "write_atomically", interrupted)
        assert command(*given).exit_code == 130
    succeed(*given)
    starts = [one.read_bytes() for one in sorted(Path("grid").glob("*/start.safetensors"))]
    assert len(starts) == 2
    assert starts[0] == starts[1]


def test_the_best_of_the_checkpoint_before_stays(finished, questions, monkeypatch):
    values, kept, real = iter([0.1, 0.5, 0.6, 0.2, 0.2, 0.2]), [], Trainer.save_checkpoint

    def save(self):
        real(self)
        kept.append(sorted(path.name for path in self.folder.glob("best-*")))

    monkeypatch.setattr(Epochs, "score", lambda _: Score(next(values), "F1"))
    monkeypatch.setattr(Trainer, "save_checkpoint", save)
    succeed(*tuned(finished, questions, "on"))
    assert [names[-1] for names in kept[:3]] == [f"best-000{n}.safetensors" for n in (1, 2, 3)]
    assert "best-0002.safetensors" in kept[2]  # what the second checkpoint needs
    assert "best-0001.safetensors" not in kept[3]
    assert not list(Path("on").glob("best-*"))


def test_samples_of_pruners_are_told(finished, questions):
    words = ["compress", finished, "--to", "wanda@uniform:0.5", "--data", questions]
    succeed(*words, "--samples", 4, "--bnt-trials", 3, "--results", "results")
    (seed,) = read_result(f"results/{CRAM}.json").seeds
    (target,) = seed.targets
    assert (target.samples, target.trials, target.after_std) == (4, 1, None)


def test_a_pruner_moves_what_stays_and_its_zeros_are_held(finished, questions):
    succeed(*tuned(finished, questions, "on", "--epochs", 1, at="sparsegpt@nm:2:4"))
    start, end = (
        load_file(f"on/{name}.safetensors")[QUERY].view(-1, 4) for name in ("start", "model")
    )
    assert bool(((start == 0).sum(1) == 2).all())
    assert torch.equal(start == 0, end == 0)
    dense = load_file(finished / "model.safetensors")[QUERY].view(-1, 4)
    assert not start[start != 0].equal(dense[start != 0])
    said = fail(*tuned(finished, questions, "no", at="sparsegpt@nm:2:4+int8"))
    assert "sparsegpt@nm:2:4+int8 does more than set weights to zero" in said
    assert not Path("no").exists()


def test_plain_training_can_be_ended_early_too_but_not_with_images(
    tiny, questions, tmp_path, monkeypatch
):
    sets = options(f"model.name={tiny}", "compress.to=[uniform:0.5]", *SETS)
    stop = options("train.early_stopping={tests: 2, patience: 1}", "compress.watch=null")
    given = ["train", CRAM, "--data", questions, "--epochs", 3, *sets, *stop, "--out", "run"]
    values = iter([0.5, 0.4])
    with monkeypatch.context() as patch:
        patch.setattr(Epochs, "score", lambda _: Score(next(values), "F1"))
        succeed(*given)
    assert held_out_values(Path("run")) == [0.5, 0.4]  # of six rounds
    assert read_result("run/result.json").seeds[0].epochs == 1
    assert read_run(Path("run"))[1].finished.epochs == 1
    with pytest.raises(ValueError, match=r"train\.early_stopping is for texts"):
        run(tmp_path / "images", digits_recipe("train.early_stopping={}"), digits())


@pytest.mark.parametrize("wrong", ["held_out: 1", "tests: 0", "patience: 0"])
def test_impossible_settings_are_named(wrong):
    with pytest.raises(ValueError, match=f"early_stopping.{wrong.split(':')[0]} is"):
        load_recipe(CRAM, [f"train.early_stopping={{{wrong}}}"])
