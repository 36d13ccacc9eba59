import json
import shutil
from dataclasses import replace

import pytest
import torch
from runs import CPU, Stop, digits, one_thread, recipe, run, stop_after, weights

from torchcram import compressible_weights, sparsity
from torchcram.experiments.data.images import ImageDataset, Images
from torchcram.experiments.evaluation.compressed_models import one_shot
from torchcram.experiments.finetuning import finetune, read_origin
from torchcram.experiments.io.weights import load_model_
from torchcram.experiments.recipe.build import build_batches
from torchcram.experiments.recipe.overrides import finetune_recipe, transfer_recipe
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.trainer import load_trained

GIVEN = recipe("compress.calibration_samples=100", method="sgd", epochs=3)
STEPS = 5


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def source(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("source")
    run(folder, GIVEN, data)
    return folder


@pytest.fixture(autouse=True)
def _one_thread():
    with one_thread():
        yield


def tuned(source, at, out, data, *overrides, epochs=2, **options):
    given = finetune_recipe(GIVEN, at, epochs=epochs, overrides=["optimizer.lr=0.05", *overrides])
    return finetune(source, at, out, **{"recipe": given, "data": data, "device": CPU, **options})


def even(data):
    """The digits, even or odd."""
    parts = [Images(part.images, part.labels % 2) for part in (data.train, data.test)]
    return ImageDataset("parity", *parts, ("even", "odd"))


def test_zeros_stay_and_the_rest_learns(tmp_path, source, data):
    found = tuned(source, "global:0.9", tmp_path / "out", data, epochs=6)
    start = found.origin
    model = found.trained.model
    before = load_trained(source, CPU).model
    load_model_(before, tmp_path / "out" / "start.safetensors")
    old, new = compressible_weights(before), compressible_weights(model)
    assert start.compressed == tuple(old)
    for name in old:
        assert bool((new[name][old[name] == 0] == 0).all())
        assert not torch.equal(new[name], old[name])
    assert found.sparsity == pytest.approx(start.sparsity) == pytest.approx(0.9, abs=1e-3)
    assert found.model_sparsity == pytest.approx(start.model_sparsity)
    assert found.trained.finished.accuracy > start.after
    assert read_origin(tmp_path / "out") == found.origin


def test_it_starts_as_one_shot_compression_ends(tmp_path, source, data):
    trained = load_trained(source, CPU)
    found = tuned(source, "global:0.7", tmp_path / "out", data, epochs=1).origin
    (one,) = one_shot(trained.model, GIVEN, data, ["global:0.7"], device=CPU, seed=0)
    start = found
    assert (start.before, start.after) == (one.before, one.after)
    assert (start.sparsity, start.model_sparsity) == (one.sparsity, one.model_sparsity)
    assert found.dense == trained.finished.accuracy


def test_dense_finetuning_holds_nothing(tmp_path, source, data):
    found = tuned(source, "dense", tmp_path / "out", data, epochs=1)
    start = found.origin
    assert (start.holds_masks, start.sparsity) == (False, 0)
    assert start.before == start.after == found.origin.dense
    saved = load_trained(source, CPU).model
    load_model_(saved, tmp_path / "out" / "start.safetensors")
    for name, value in load_trained(source, CPU).model.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value)


def test_dense_ends_stay_dense(tmp_path, data):
    given = replace(GIVEN, compress=replace(GIVEN.compress, dense_ends=True))
    run(tmp_path / "run", given, data)
    found = tuned(tmp_path / "run", "global:0.9", tmp_path / "out", data, epochs=1)
    names = list(compressible_weights(found.trained.model))
    assert found.origin.compressed == tuple(names[1:-1])


def test_stopped_it_continues_bit_for_bit_from_the_file(tmp_path, source, data, monkeypatch):
    tuned(source, "global:0.8", tmp_path / "whole", data)
    with pytest.raises(Stop):
        tuned(source, "global:0.8", tmp_path / "out", data, make_step=stop_after(STEPS + 2))
    monkeypatch.setattr("torchcram.experiments.finetuning.write_start", None)  # is not asked again
    tuned(source, "global:0.8", tmp_path / "out", data)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")


def test_stopped_before_the_origin_was_written_it_begins_anew(tmp_path, source, data, monkeypatch):
    def stop(*_):
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("torchcram.experiments.finetuning.write_atomically", stop)
        with pytest.raises(Stop):
            tuned(source, "global:0.8", tmp_path, data)
    assert (tmp_path / "start.safetensors").exists()
    tuned(source, "global:0.8", tmp_path, data)


def test_the_seed_is_that_of_the_run_unless_given(tmp_path, source, data):
    one = tuned(source, "global:0.8", tmp_path / "0", data, epochs=1)
    other = tuned(source, "global:0.8", tmp_path / "1", data, epochs=1, seed=1)
    assert (one.trained.info.seed, other.trained.info.seed) == (0, 1)
    assert weights(tmp_path / "0") != weights(tmp_path / "1")


def test_cram_can_be_held_to_masks_too(tmp_path, source, data):
    changes = ["cram.operators=[global:0.95]"]
    found = tuned(source, "global:0.8", tmp_path, data, *changes, epochs=1)
    assert found.trained.recipe.cram.rule == "CrAM+"
    assert found.sparsity == pytest.approx(0.8, abs=1e-3)


def test_zeros_are_held_in_an_average_of_the_weights(tmp_path, source, data):
    found = tuned(source, "global:0.8", tmp_path / "on", data, "train.ema=0.9")
    assert found.sparsity == found.origin.sparsity == pytest.approx(0.8, abs=1e-3)
    tuned(source, "global:0.8", tmp_path / "off", data)
    assert weights(tmp_path / "on") != weights(tmp_path / "off")


class Forgetful(EagerStep):
    """Sets a weight after the step, whatever the masks say."""

    def run(self):
        super().run()
        with torch.no_grad():
            next(self._model.parameters()).add_(1)


def test_a_zero_that_came_back_is_an_error(tmp_path, source, data):
    with pytest.raises(
        ValueError, match=r"pruned weights of 'features\.0\.weight' are not zero any more"
    ):
        tuned(source, "global:0.9", tmp_path, data, epochs=1, make_step=Forgetful)


@pytest.mark.parametrize("at", ["int4", "global:0.8+int4", "int4+global:0.5"])
def test_what_training_would_undo_is_refused(tmp_path, source, data, at):
    with pytest.raises(ValueError, match="does more than set weights to zero"):
        tuned(source, at, tmp_path / "out", data)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"at": "global:0.8"}, "at is 'global:0.9', not 'global:0.8'"),
        ({"seed": 5}, "seed is 0, not 5"),
        ({"new_head": True}, "new_head is False, not True"),
    ],
)
def test_the_folder_of_another_start_is_refused_and_left_alone(tmp_path, source, data, other, said):
    tuned(source, "global:0.9", tmp_path, data, epochs=1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    options = {"at": "global:0.9", **other}
    with pytest.raises(ValueError, match="holds another run: " + said):
        tuned(source, options.pop("at"), tmp_path, data, epochs=1, **options)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_the_folder_of_a_plain_run_is_refused(tmp_path, source, data):
    folder = shutil.copytree(source, tmp_path / "run")
    with pytest.raises(ValueError, match="did not start from a finished one"):
        tuned(source, "global:0.9", folder, data)
    assert not (folder / "start.safetensors").exists()


@pytest.mark.parametrize("content", ["{", "{}", '{"at": 3}'])
def test_a_damaged_origin_is_named(tmp_path, source, data, content):
    tuned(source, "global:0.9", tmp_path, data, epochs=1)
    (tmp_path / "start.json").write_text(content)
    with pytest.raises(ValueError, match=r"start\.json"):
        tuned(source, "global:0.9", tmp_path, data, epochs=1)


def test_other_classes_need_a_new_head(tmp_path, source, data):
    with pytest.raises(
        ValueError, match="has 10 classes, 'parity' has 2: the model needs a new head"
    ):
        tuned(source, "global:0.9", tmp_path / "out", even(data))
    assert not (tmp_path / "out").exists()


def test_another_model_is_refused_before_anything_is_written(tmp_path, source, data):
    with pytest.raises(ValueError, match=r"has the model 'convnet-digits', .* 'resnet20'"):
        tuned(source, "global:0.9", tmp_path / "out", data, "model.name=resnet20")
    assert not (tmp_path / "out").exists()


def test_images_that_the_model_does_not_take_are_refused(tmp_path, source, data):
    parts = [
        Images(part.images.repeat(1, 1, 1, 3), part.labels) for part in (data.train, data.test)
    ]
    other = ImageDataset("coloured", *parts, data.classes)
    with pytest.raises(ValueError, match=r"'convnet-digits' does not take .* 'coloured', 3x8x8"):
        tuned(source, "global:0.9", tmp_path, other, new_head=True)
    assert not (tmp_path / "start.json").exists()


def test_other_data_takes_a_new_head(tmp_path, source):
    fewer = digits(train=300)
    with pytest.raises(ValueError, match=r"on other data: train_images is 320, not 300"):
        tuned(source, "global:0.9", tmp_path / "out", fewer)
    assert not (tmp_path / "out").exists()


def test_transfer_has_a_new_head_without_a_mask(tmp_path, source, data):
    changes = ["optimizer.lr=0.2", "train.batch_size=16"]
    given = transfer_recipe(GIVEN, "global:0.9", GIVEN, epochs=4, overrides=changes)
    options = {"recipe": given, "data": even(data), "device": CPU, "new_head": True}
    found = finetune(source, "global:0.9", tmp_path / "out", **options)
    learnt = dict(found.trained.model.named_parameters())
    assert learnt["fc.weight"].shape == (2, 48)
    assert sparsity({"head": learnt["fc.weight"]}) == 0
    start = found.origin
    assert "fc.weight" not in start.compressed
    assert (start.before, start.after) == (None, None)
    held = {name: learnt[name] for name in start.compressed}
    assert sparsity(held) == pytest.approx(start.sparsity) == pytest.approx(0.9, abs=0.02)
    assert found.trained.finished.accuracy > 0.75  # chance is a half
    again = load_trained(tmp_path / "out", CPU)
    assert torch.equal(again.model.fc.weight, learnt["fc.weight"])
    with pytest.raises(Stop):
        finetune(source, "global:0.9", tmp_path / "cut", make_step=stop_after(27), **options)
    finetune(source, "global:0.9", tmp_path / "cut", **options)
    assert weights(tmp_path / "cut") == weights(tmp_path / "out")


def test_the_origin_says_where_it_came_from(tmp_path, source, data):
    tuned(source, "global:0.9", tmp_path, data, epochs=1)
    said = json.loads((tmp_path / "start.json").read_text())
    assert said["run"] == str(source)
    assert said["at"] == "global:0.9"


def test_distillation_brings_the_scores_nearer_to_those_of_the_dense_model(tmp_path, source, data):
    images, _ = next(build_batches(GIVEN, data, train=False, device=CPU, seed=0).epoch(0))
    teacher = load_trained(source, CPU).model

    @torch.no_grad()
    def apart(model):
        return float((model(images).softmax(1) - teacher(images).softmax(1)).abs().mean())

    alone, taught = (
        tuned(source, "global:0.9", tmp_path / name, data, *sets, epochs=4)
        for name, sets in (("alone", ()), ("taught", ["train.distillation.weight=1"]))
    )
    assert apart(taught.trained.model) < 0.8 * apart(alone.trained.model)
    assert taught.sparsity == pytest.approx(0.9, abs=1e-3)
    assert taught.trained.recipe.train.distillation.temperature == 2


def test_distillation_stopped_and_continued_is_the_same(tmp_path, source, data):
    sets = ["train.distillation={}"]
    tuned(source, "global:0.8", tmp_path / "whole", data, *sets)
    with pytest.raises(Stop):
        tuned(source, "global:0.8", tmp_path / "out", data, *sets, make_step=stop_after(STEPS + 2))
    tuned(source, "global:0.8", tmp_path / "out", data, *sets)
    assert weights(tmp_path / "out") == weights(tmp_path / "whole")
    with pytest.raises(ValueError, match="distillation"):  # the folder is of another run
        tuned(source, "global:0.8", tmp_path / "out", data)


def test_distillation_takes_a_model_of_the_same_classes(tmp_path, source, data):
    given = recipe("train.distillation={}", method="sgd", epochs=1)
    with pytest.raises(ValueError, match="a trained model as the teacher, which fine-tuning"):
        run(tmp_path / "plain", given, data)
    assert not (tmp_path / "plain").exists()
    moved = transfer_recipe(GIVEN, "dense", given)
    with pytest.raises(ValueError, match="a new head has other classes; allowed: null"):
        finetune(
            source,
            "dense",
            tmp_path / "moved",
            recipe=moved,
            data=even(data),
            device=CPU,
            new_head=True,
        )
    assert not (tmp_path / "moved").exists()
