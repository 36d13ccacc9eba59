import pytest
import torch
from runs import CPU, digits, recipe
from torch import nn

from torchcram.experiments.evaluation.compressed_models import score_on_test
from torchcram.experiments.recipe.build import build_batches, build_initial_model
from torchcram.experiments.tasks.images import accuracy as evaluate


class Told(nn.Module):
    """Gives the scores that it is shown, and remembers in which mode."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.modes = []

    def forward(self, x):
        self.modes.append((self.training, self.norm.training))
        return x


def batch(predicted, labels):
    return nn.functional.one_hot(torch.tensor(predicted), 3).float(), torch.tensor(labels)


def test_it_is_the_fraction_of_right_answers_over_batches_of_any_size():
    batches = [batch([0, 1, 2, 2], [0, 1, 2, 0]), batch([1], [2])]
    assert evaluate(Told(), batches, CPU) == 3 / 5


def test_modes_are_those_of_before_afterwards():
    model = Told()
    model.norm.eval()
    evaluate(model, [batch([0], [0])], CPU)
    assert model.modes == [(False, False)]
    assert (model.training, model.norm.training) == (True, False)


def test_modes_are_those_of_before_after_an_error():
    model = Told()
    with pytest.raises(RuntimeError):
        evaluate(model, [(torch.zeros(2, 3), torch.zeros(5))], CPU)
    assert model.training
    assert model.norm.training


def test_nothing_to_evaluate_on_is_an_error():
    with pytest.raises(ValueError, match="no batch came"):
        evaluate(Told(), [], CPU)


def test_no_gradients_are_kept():
    model = nn.Linear(3, 3)
    seen = []
    model.register_forward_hook(lambda *found: seen.append(found[2].requires_grad))
    evaluate(model, [batch([0], [0])], CPU)
    assert seen == [False]


def test_the_test_images_are_all_looked_at_once_as_they_are():
    data, given = digits(train=64, test=77), recipe()
    model = build_initial_model(given, classes=10, seed=0).eval()
    images = data.test.images.permute(0, 3, 1, 2) / 255
    scores = model((images - data.mean[0]) / data.std[0])
    expected = float((scores.argmax(1) == data.test.labels).double().mean())
    assert score_on_test(model, given, data, device=CPU).value == pytest.approx(expected, abs=1e-9)
    batches = build_batches(given, data, train=False, device=CPU, seed=0)
    assert sum(len(labels) for _, labels in batches.epoch(0)) == 77
