"""Captured steps with a plain call in place of the graph, which needs a GPU."""

import pytest
import torch
from replayed import Replayed
from runs import CPU, digits, recipe, run, weights

from torchcram.experiments.recipe.build import build_batches, build_initial_model, build_optimizer
from torchcram.experiments.training import cuda_graph_steps as fast
from torchcram.experiments.training.steps import EagerStep, Objective


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("method", ["sgd", "cram-plus-multi", "cram-plus-multi-1x"])
def test_steps_and_losses_are_those_of_the_eager_path(monkeypatch, method, accumulation):
    monkeypatch.setattr(fast, "StepGraphs", Replayed)
    given = recipe(f"train.accumulation={accumulation}", method=method)
    data = digits(train=128, test=10)
    found = []
    for kind in (EagerStep, fast.GraphStep):
        model = build_initial_model(given, classes=10, seed=0).train()
        optimizer = build_optimizer(given, model, seed=0)
        batches = build_batches(given, data, train=True, device=CPU, seed=0)
        shares = (1.0, 1.0) if given.cram is None else given.cram.shares
        objective = Objective(shares=shares)
        step = kind(model, optimizer, batches, given.train, CPU, objective=objective)
        for epoch in (0, 1):
            step.start_epoch(epoch)
            for _ in range(len(batches)):
                step.run()
        found.append((step.losses(), model.state_dict()))
    (eager, state), (captured, others) = found
    assert captured == eager
    assert all(torch.equal(value, others[name]) for name, value in state.items())


def test_an_average_of_the_weights_follows_captured_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(fast, "StepGraphs", Replayed)
    given, data = recipe("train.ema=0.8", epochs=1), digits(train=192, test=10)
    for kind in (EagerStep, fast.GraphStep):
        run(tmp_path / kind.__name__, given, data, make_step=kind)
    assert weights(tmp_path / "GraphStep") == weights(tmp_path / "EagerStep")


def test_the_cpu_takes_eager_steps():
    given, data = recipe(), digits(train=128, test=10)
    model = build_initial_model(given, classes=10, seed=0)
    batches = build_batches(given, data, train=True, device=CPU, seed=0)
    optimizer = build_optimizer(given, model, seed=0)
    assert type(fast.make_step(model, optimizer, batches, given.train, CPU)) is EagerStep
