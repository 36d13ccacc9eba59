"""On real images: looking at data loses less accuracy than magnitudes do; the example runs."""

import copy
import re

import pytest
import torch
from commands import run_example
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import UniformTopK
from torchcram.pruners import Obs, SparseGPT, prune_

pytest.importorskip("sklearn")


def loss(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


@pytest.fixture(scope="module")
def trained():
    from torchcram.experiments.data.images.digits import split_digits

    train, labels, test, answers = split_digits()
    train, test = train.flatten(1).float() / 16, test.flatten(1).float() / 16
    torch.manual_seed(0)
    layers = [nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(15):
        for chosen in torch.randperm(len(train)).split(48):
            optimizer.zero_grad()
            loss(model, (train[chosen], labels[chosen])).backward()
            optimizer.step()
    return model, (train, labels), (test, answers)


def accuracy(trained, operator, size):
    model, (train, labels), (test, answers) = trained
    model = copy.deepcopy(model)
    batches = list(zip(train.split(size), labels.split(size), strict=True))
    prune_(model, operator, batches, loss=loss)
    return 100 * float((model(test).argmax(1) == answers).float().mean())


def test_reconstruction_loses_less_than_magnitudes_at_90_percent(trained):
    pattern = UniformTopK(0.9)
    magnitude, ours = accuracy(trained, pattern, 500), accuracy(trained, SparseGPT(pattern), 500)
    assert accuracy(trained, UniformTopK(0.0), 500) > 95
    assert ours > magnitude + 8, (magnitude, ours)


def test_second_order_loses_less_than_magnitudes_at_90_percent(trained):
    pattern = UniformTopK(0.9)
    obs = Obs(pattern, gradients=128, recomputations=8)
    magnitude, ours = accuracy(trained, pattern, 1), accuracy(trained, obs, 1)
    assert ours > magnitude + 8, (magnitude, ours)


def test_the_example_runs(tmp_path):
    printed = run_example("pruners", "2", cwd=tmp_path)
    found = re.findall(r"^(\S+): (\d+\.\d)%$", printed, re.MULTILINE)
    assert [name.partition("@")[0] for name, _ in found] == [
        "dense",
        "uniform:0.8",
        "wanda",
        "sparsegpt",
        "obs",
    ]
    assert float(found[0][1]) > 15  # ten classes, two epochs
