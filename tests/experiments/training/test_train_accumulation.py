"""Batches in micro-batches: the steps are those on whole batches, up to rounding."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runs import CPU, Stop, digits, recipe, run, stop_after, weights
from torch import nn

from torchcram import hold_masks
from torchcram.batches import micro_batches
from torchcram.experiments.data.text.blocks import IGNORED
from torchcram.experiments.ranks import Ranks
from torchcram.experiments.recipe.build import build_optimizer
from torchcram.experiments.recipe.methods import MethodConfig
from torchcram.experiments.recipe.schema import DistillConfig, TrainConfig
from torchcram.experiments.tasks.language_modelling import LanguageModelling
from torchcram.experiments.training import steps
from torchcram.experiments.training.steps import Objective, train_on
from torchcram.experiments.training.trainer import _check_accumulation

STEPS, BATCH = 6, 14  # not a multiple of the micro-batches
ONE = "cram.dense_share=0.5", "cram.compressed_share=0.5"
SETTINGS = {
    "CrAM": ["cram.rule=CrAM"],
    "CrAM+": ["cram.rho=0.1"],
    "C-SAM": ["cram.rule=C-SAM"],
    "SAM": ["cram={rule: SAM, operators: []}"],
    "Top-K": ["cram.rule=Top-K"],
    "Top-K+": ["cram.rule=Top-K+"],
    "shares": list(ONE),
    "overlapping shares": ["cram.compressed_share=0.5", "cram.rho=0.1"],
    "bits": ["cram.operators=[int4, global:0.5]"],
    "kept masks": ["cram.mask_interval=3"],
    "plain steps": ["cram.base_step_probability=0.5"],
    "AdamW": ["optimizer.name=adamw", "optimizer.lr=0.01"],
}
METHODS = {
    "dpf": MethodConfig("dpf", "global:0.7", args={"end": "75 %", "interval": 2}),
    "movement": MethodConfig(
        "movement", "global:0.7", args={"end": "75 %", "interval": 2, "score_lr": 1.0}
    ),
    "l0": MethodConfig("l0", "uniform:0.7", args={"gate_lr": 5.0}),
}
RECIPES = {
    **{name: recipe(*sets, f"train.batch_size={BATCH}") for name, sets in SETTINGS.items()},
    "SGD": recipe(f"train.batch_size={BATCH}", method="sgd"),
    **{name: replace(recipe(method="sgd"), method=method) for name, method in METHODS.items()},
}


def batches(classes=10):
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(STEPS, BATCH, 1, 8, 8, dtype=torch.float64, generator=generator)
    labels = torch.randint(classes, (STEPS, BATCH), generator=generator)
    return list(zip(inputs, labels, strict=True))


def net():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(384, 10)
    return nn.Sequential(*layers).double()


def trained(chosen, accumulation, *, objective=None, holding=False):
    """The losses and the weights after a few steps in double precision."""
    model, losses = net(), []
    optimizer = build_optimizer(chosen, model, seed=0, steps_per_epoch=STEPS)
    config = replace(chosen.train, accumulation=accumulation)
    shares = (1.0, 1.0) if chosen.cram is None else chosen.cram.shares
    objective = objective or Objective(shares=shares)
    if holding:
        held = {"3.weight": model[3].weight}
        hold_masks(optimizer, held, {"3.weight": model[3].weight.abs() > 0.02})
    torch.manual_seed(1)  # gates of L0
    for batch in batches():
        losses += train_on(batch, model, optimizer, config=config, objective=objective)
    return [loss for loss in losses if loss is not None], list(model.parameters())


def assert_same(ours, theirs, tolerance=1e-9):
    for one, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_those_on_whole_batches(name):
    assert_same(trained(RECIPES[name], 4), trained(RECIPES[name], 1))


def test_a_batch_may_be_single_samples():
    assert_same(trained(RECIPES["shares"], BATCH // 2), trained(RECIPES["shares"], 1))


def test_masks_are_held():
    ours, theirs = (trained(RECIPES["SGD"], count, holding=True) for count in (3, 1))
    assert_same(ours, theirs)
    assert (ours[1][2] == 0).float().mean() > 0.3


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_distillation_weighs_samples(smoothing):
    teacher = net().eval()
    torch.nn.init.normal_(teacher[3].weight)
    config = {"label_smoothing": smoothing, "distillation": DistillConfig(0.6, 2.0)}
    chosen = replace(RECIPES["CrAM+"], train=replace(RECIPES["CrAM+"].train, **config))
    objective = Objective(teacher=teacher)
    found = [trained(chosen, count, objective=objective) for count in (4, 1)]
    assert_same(*found, tolerance=1e-5)  # scores are compared in single precision
    assert abs(found[0][0][0] - trained(chosen, 1)[0][0]) > 0.01


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("teaches", [False, True])
def test_losses_are_weighted_by_their_targets(smoothing, teaches):
    """Tokens that do not count are unevenly spread, and a micro-batch has nothing else."""
    torch.manual_seed(0)
    tokens = torch.randint(7, (5, 4))
    labels = tokens.roll(-1, 1)
    labels[0], labels[1, 1:], labels[4, 0] = IGNORED, IGNORED, IGNORED
    task = object.__new__(LanguageModelling)
    distilled = DistillConfig(0.5, 1.0) if teaches else None
    found = []
    for count in (1, 5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 6), nn.Linear(6, 7)).double()
        teacher = nn.Embedding(7, 7).double() if teaches else None
        objective = Objective(task.loss, -1, teacher=teacher, count_targets=task.count_targets)
        config = TrainConfig(1, 5, "fp32", smoothing, distillation=distilled, accumulation=count)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        taken = [
            train_on((tokens, labels), model, optimizer, config=config, objective=objective)[0]
            for _ in range(3)
        ]
        found.append((taken, list(model.parameters())))
    assert_same(*found, tolerance=1e-5)  # weights are in single precision


def test_ddp_averages_gradients_once_in_each_pass(monkeypatch):
    events = []

    class Wrapped(nn.Module):
        """Stands for DDP, and notes what happens while it does not average."""

        def __init__(self, module):
            super().__init__()
            self.module = module
            self.averages = True

        def forward(self, x):
            events.append(("forward", self.averages))
            scores = self.module(x)
            scores.register_hook(lambda _: events.append(("backward", self.averages)))
            return scores

        @contextmanager
        def no_sync(self):
            self.averages = False
            yield
            self.averages = True

    monkeypatch.setattr(steps, "DistributedDataParallel", Wrapped)
    model, config = Wrapped(net()), replace(RECIPES["CrAM+"].train, accumulation=3)
    optimizer = build_optimizer(RECIPES["CrAM+"], model, seed=0)
    train_on(batches()[0], model, optimizer, config=config)
    both = ("forward", "backward")
    once = [(word, now) for now in (False, False, True) for word in both]
    assert events == once * 2


def test_a_stopped_training_continues_exactly(tmp_path):
    chosen, data = recipe("train.accumulation=3", *ONE), digits(train=192, test=20)
    run(tmp_path / "whole", chosen, data)
    with pytest.raises(Stop):
        run(tmp_path / "stopped", chosen, data, make_step=stop_after(5))
    run(tmp_path / "stopped", chosen, data)
    assert weights(tmp_path / "whole") == weights(tmp_path / "stopped")
    assert "accumulation: 3" in (tmp_path / "whole" / "recipe.yaml").read_text()


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["train.accumulation=0"], "train.accumulation is 0; allowed: at least 1"),
        (["train.accumulation=1.5"], "train.accumulation is 1.5; allowed: an integer"),
        (["train.accumulation=true"], "train.accumulation is True; allowed: an integer"),
        (["train.accumulation=65"], "train.accumulation is 65; allowed: at most 64, the number"),
        (["train.accumulation=33", *ONE], "is 33; allowed: at most 32, the number of samples"),
    ],
)
def test_impossible_numbers_are_named(sets, message):
    with pytest.raises(ValueError, match=message):
        recipe("train.batch_size=64", *sets)


def test_micro_batches_without_samples_are_refused_before_training(tmp_path):
    chosen = recipe("train.batch_size=64", "train.accumulation=30", *ONE)
    with pytest.raises(ValueError, match="is 30; allowed: at most 10, the samples that each of 1"):
        run(tmp_path, chosen, digits(train=20, test=10))
    whole = recipe("train.batch_size=64", "train.accumulation=32")
    _check_accumulation(whole, 64, Ranks(0, 2))
    with pytest.raises(ValueError, match="at most 31, the samples that each of 2 processes"):
        _check_accumulation(whole, 63, Ranks(1, 2))


@given(st.integers(1, 40), st.integers(1, 50))
def test_micro_batches_are_the_batch_in_equal_parts(samples, count):
    x, y = torch.arange(samples).view(-1, 1), torch.arange(samples)
    pieces = micro_batches((x, y), count)
    assert len(pieces) == min(count, samples)
    sizes = {len(labels) for _, labels in pieces}
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(torch.cat([inputs for inputs, _ in pieces]), x)
    assert torch.equal(torch.cat([labels for _, labels in pieces]), y)


def test_no_micro_batches_are_refused():
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        micro_batches(torch.zeros(3), 0)


def test_batch_norm_sees_micro_batches():
    """Which is why whole batches give other statistics, as the documentation says."""
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, 10)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    config = replace(recipe().train, accumulation=2)
    train_on(batches()[0], model.to(CPU).train(), optimizer, config=config)
    assert model[1].num_batches_tracked == 2
