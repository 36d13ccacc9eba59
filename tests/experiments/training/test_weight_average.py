import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runs import CPU, Stop, digits, recipe, run, stop_after, weights
from safetensors.torch import load_file
from torch import nn

from torchcram.experiments.evaluation.compressed_models import one_shot, score_on_test
from torchcram.experiments.recipe.methods import MethodConfig
from torchcram.experiments.recipe.overrides import finetune_recipe
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.steps import EagerStep
from torchcram.experiments.training.weight_average import WeightAverage

STEPS = 5  # of an epoch: 320 images in batches of 64
HALVES = ("cram.dense_share=0.5", "cram.compressed_share=0.5")
RECIPES = {
    "SGD": {"method": "sgd"},
    "CrAM+-Multi": {},
    "half a batch each": {"overrides": HALVES},
}


@pytest.fixture(scope="module")
def data():
    return digits()


def averaging(name="CrAM+-Multi", *others, epochs=2, ema=0.8):
    given = dict(RECIPES[name])
    overrides = (*given.pop("overrides", ()), *others, f"train.ema={ema}")
    return recipe(*overrides, epochs=epochs, **given)


def oracle(sequence, decay):
    """The average of a sequence of tensors, straight from its definition."""
    average = sequence[0].double()
    for t, value in enumerate(sequence[1:], 1):
        d = min(decay, (1 + t) / (10 + t))
        average = d * average + (1 - d) * value.double()
    return average


@given(st.floats(1e-3, 1, exclude_max=True), st.integers(1, 25))
@settings(max_examples=15, deadline=None)
def test_the_average_is_that_of_the_definition(decay, steps):
    model = nn.Linear(3, 2)
    average = WeightAverage(model, decay)
    sequence = [torch.randn(2, 3) for _ in range(steps)]
    for value in sequence:
        with torch.no_grad():
            model.weight.copy_(value)
        average.update_parameters(model)
        assert torch.equal(model.weight, value)
    expected = oracle(sequence, decay).float()
    torch.testing.assert_close(average.module.weight.detach(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(average.module.bias, model.bias)  # what stays the same, to the bit


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.plain = nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("table", torch.arange(500), persistent=False)

    def forward(self, x):
        return self.plain(self.norm(x))


def test_statistics_are_averaged_and_other_buffers_copied():
    model = Buffered()
    average, means, variances = WeightAverage(model, 0.7), [], []
    for number in range(6):
        model(number + torch.randn(16, 4) * number)
        model.mask[0] = number
        average.update_parameters(model)
        means.append(model.norm.running_mean.clone())
        variances.append(model.norm.running_var.clone())
    norm = average.module.norm
    torch.testing.assert_close(norm.running_mean.double(), oracle(means, 0.7), check_dtype=False)
    torch.testing.assert_close(norm.running_var.double(), oracle(variances, 0.7))
    assert int(norm.num_batches_tracked) == 6
    assert average.module.mask.tolist() == [5, -torch.inf]
    assert torch.equal(average.module.table, torch.arange(500))


def recording(states):
    """Steps that note the weights after every step."""

    class Recording(EagerStep):
        def run(self):
            super().run()
            state = self._model.state_dict()
            states.append({name: value.detach().clone() for name, value in state.items()})

    return Recording


def checkpointed(folder, epoch=2):
    """The state of the training in a checkpoint."""
    content = (folder / "checkpoints" / f"epoch-{epoch:04d}.pt").read_bytes().partition(b"\n")[2]
    return torch.load(io.BytesIO(content), weights_only=True)["state"]["training"]


@pytest.mark.parametrize("name", RECIPES)
def test_the_model_of_a_run_is_the_average_and_training_does_not_notice(tmp_path, data, name):
    states, watch = [], "compress.watch=global:0.7"
    found = run(tmp_path / "on", averaging(name, watch), data, make_step=recording(states))
    assert len(states) == 2 * STEPS
    saved = load_file(tmp_path / "on" / "model.safetensors")
    for key, value in saved.items():
        if value.is_floating_point():
            expected = oracle([state[key] for state in states], 0.8)
            torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-6, msg=key)
        else:
            assert torch.equal(value, states[-1][key])
    options = dict(RECIPES[name])
    run(tmp_path / "off", recipe(*options.pop("overrides", ()), epochs=2, **options), data)
    raw = load_file(tmp_path / "off" / "model.safetensors")
    assert all(torch.equal(value, states[-1][key]) for key, value in raw.items())
    # what is tested and watched is the model of the run
    last = read_log(tmp_path / "on")[-1]
    given, score = found.recipe, score_on_test(found.model, found.recipe, data, device=CPU)
    assert score.value == last.accuracy == found.finished.accuracy
    (target,) = one_shot(found.model, given, data, ["global:0.7"], device=CPU, seed=0)
    assert target.after == last.compressed_accuracy


def test_stopped_and_continued_is_the_same_as_never_stopped(tmp_path, data):
    given = averaging("half a batch each", "optimizer.name=adamw", "optimizer.lr=0.01", epochs=3)
    run(tmp_path / "whole", given, data)
    for steps in (STEPS + 2, STEPS + 1):  # in the second epoch, then in the third
        with pytest.raises(Stop):
            run(tmp_path / "stopped", given, data, make_step=stop_after(steps))
    run(tmp_path / "stopped", given, data)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    whole, stopped = (checkpointed(tmp_path / name, 3) for name in ("whole", "stopped"))
    for part in ("model", "average"):
        assert all(torch.equal(stopped[part][key], value) for key, value in whole[part].items())
    assert int(whole["average"]["n_averaged"]) == 3 * STEPS
    accuracies = [[one.accuracy for one in read_log(tmp_path / n)] for n in ("whole", "stopped")]
    assert accuracies[0] == accuracies[1]


def test_a_run_that_ended_before_its_model_was_written_writes_the_average(tmp_path, data):
    given = averaging()
    found = run(tmp_path, given, data)
    before = weights(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    again = run(tmp_path, given, data, make_step=stop_after(0))
    assert weights(tmp_path) == before
    assert again.finished.accuracy == found.finished.accuracy


def test_another_decay_is_another_run(tmp_path, data):
    run(tmp_path, averaging(epochs=1), data)
    with pytest.raises(ValueError, match=r"holds another run: recipe.train.ema is 0.8, not 0.9"):
        run(tmp_path, averaging(epochs=1, ema=0.9), data)


@pytest.mark.parametrize("wrong", ["0", "1", "1.5", "-0.1", ".nan", "often", "true", "{}"])
def test_a_decay_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match=r"train.ema is .*; allowed: (between 0 and 1|a finite)"):
        averaging(ema=wrong)


def test_the_decay_is_written_where_there_is_one():
    assert "ema" not in recipe("train.ema=null").to_dict()["train"]
    assert averaging(ema=0.999).to_dict()["train"]["ema"] == 0.999


def test_a_method_that_prunes_is_refused_together_with_an_average():
    said = "train.ema is 0.999; allowed: null, as dpf prunes the weights, but not their average"
    section = "method={name: dpf, target: global:0.9, args: {end: 5}}"
    with pytest.raises(ValueError, match=said):
        recipe(section, "train.ema=0.999", method="sgd")
    assert recipe(section, method="sgd").method == MethodConfig("dpf", "global:0.9", {"end": 5})


def test_fine_tuning_averages_if_the_training_did():
    assert finetune_recipe(averaging(), "global:0.9").train.ema == 0.8
    off = finetune_recipe(averaging(), "global:0.9", overrides=["train.ema=null"])
    assert off.train.ema is None
