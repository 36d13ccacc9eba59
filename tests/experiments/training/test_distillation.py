"""Distillation: its loss, and the teacher of a training."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import CPU, Stop, digits, recipe, run, stop_after, weights
from torch.nn.functional import kl_div

from torchcram import compress
from torchcram.experiments.recipe.build import build_batches
from torchcram.experiments.recipe.schema import DistillConfig, TrainConfig
from torchcram.experiments.training.steps import distillation_loss, loss_of
from torchcram.experiments.training.trainer import Start, load_trained


@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.5, 8), st.integers(0, 99))
def test_it_is_the_divergence_of_what_the_scores_say(n, classes, temperature, seed):
    generator = torch.Generator().manual_seed(seed)
    scores, wanted = (3 * torch.randn(2, n, classes, generator=generator)).unbind()
    found = distillation_loss(scores, wanted, temperature)
    log, target = ((one / temperature).log_softmax(1) for one in (scores, wanted))
    expected = kl_div(log, target, reduction="batchmean", log_target=True)
    assert float(found) == pytest.approx(float(expected) * temperature**2, rel=1e-4, abs=1e-5)
    assert float(distillation_loss(wanted, wanted, temperature)) == pytest.approx(0, abs=1e-6)


def test_padding_counts_for_nothing():
    generator = torch.Generator().manual_seed(0)
    scores, wanted = torch.randn(2, 3, 5, 2, generator=generator).unbind()
    padded, other = (
        torch.cat((one, torch.full((3, 2, 2), -torch.inf)), 1) for one in (scores, wanted)
    )
    scores.requires_grad_()
    padded.requires_grad_()
    losses = [distillation_loss(scores, wanted, 2.0), distillation_loss(padded, other, 2.0)]
    assert losses[0].item() == pytest.approx(losses[1].item())
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(padded.grad[:, :5], scores.grad)
    assert not padded.grad[:, 5:].any()


def test_labels_have_the_rest_of_the_loss():
    scores, wanted = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1)).unbind()
    labels = torch.tensor([0, 1, 2, 0])
    config = TrainConfig(epochs=1, batch_size=4, distillation=DistillConfig(0.25, 3.0))
    hard = loss_of(scores, labels, config)
    assert hard == loss_of(scores, labels, TrainConfig(epochs=1, batch_size=4))
    expected = 0.75 * hard + 0.25 * distillation_loss(scores, wanted, 3.0)
    torch.testing.assert_close(loss_of(scores, labels, config, wanted), expected)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("weight=0", "train.distillation.weight is 0.0; allowed: above 0 and at most 1"),
        ("weight=1.5", "train.distillation.weight is 1.5; allowed: above 0 and at most 1"),
        ("temperature=0", "train.distillation.temperature is 0.0; allowed: above 0"),
    ],
)
def test_impossible_settings_are_named(setting, said):
    with pytest.raises(ValueError, match=said):
        recipe(f"train.distillation.{setting}")


def test_it_is_written_only_where_it_is_set():
    assert "distillation" not in recipe().to_dict()["train"]
    section = recipe("train.distillation.weight=0.5").to_dict()["train"]["distillation"]
    assert section == {"weight": 0.5, "temperature": 2.0}


PLAIN = recipe(method="sgd")
TAUGHT = recipe("train.distillation.weight=1", epochs=2)


@pytest.fixture(scope="module")
def data():
    return digits()


@pytest.fixture(scope="module")
def dense(tmp_path_factory, data):
    """A model that was trained plainly."""
    folder = tmp_path_factory.mktemp("dense")
    run(folder, PLAIN, data)
    return load_trained(folder, CPU).model


def test_a_training_learns_from_the_model_that_it_starts_from(tmp_path, data, dense):
    images, _ = next(build_batches(PLAIN, data, train=False, device=CPU, seed=0).epoch(0))
    alone = recipe(epochs=2)

    @torch.no_grad()
    def distance(model):
        return float((model(images).softmax(1) - dense(images).softmax(1)).abs().mean())

    models = [
        run(tmp_path / name, given, data, start=Start(dense)).model
        for name, given in (("alone", alone), ("taught", TAUGHT))
    ]
    for alone_, taught in (models, [compress(model, "global:0.5") for model in models]):
        assert distance(taught) < 0.8 * distance(alone_)


def test_a_training_with_a_teacher_is_continued_bit_for_bit(tmp_path, data, dense):
    run(tmp_path / "whole", TAUGHT, data, start=Start(dense))
    with pytest.raises(Stop):
        run(tmp_path / "cut", TAUGHT, data, start=Start(dense), make_step=stop_after(7))
    run(tmp_path / "cut", TAUGHT, data, start=Start(dense))
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_another_teacher_is_another_run(tmp_path, data, dense):
    run(tmp_path / "run", TAUGHT, data, start=Start(dense))
    other = compress(dense, "global:0.5")
    with pytest.raises(ValueError, match="start"):
        run(tmp_path / "run", TAUGHT, data, start=Start(dense, teacher=other))


def test_a_model_that_is_not_trained_teaches_nothing(tmp_path, data):
    with pytest.raises(ValueError, match=r"needs a trained model as the teacher.*allowed here: nu"):
        run(tmp_path / "run", TAUGHT, data)
    assert not (tmp_path / "run").exists()
