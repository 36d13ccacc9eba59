import pytest
import torch
from runs import CPU, digits, recipe
from torch.optim import SGD, AdamW

from torchcram import C_SAM, SAM, CrAM, GlobalTopK
from torchcram.experiments.machine import machine_name, versions
from torchcram.experiments.recipe.build import (
    build_batches,
    build_initial_model,
    build_optimizer,
    cram_weights,
    to_device,
)
from torchcram.experiments.training.log import MaskChange


def model_of(given, seed=0):
    return build_initial_model(given, classes=10, seed=seed)


def test_the_seed_decides_the_initial_weights_and_nothing_else_does():
    given, state = recipe(), torch.get_rng_state()
    one, two, other = model_of(given), model_of(given), model_of(given, seed=1)
    assert torch.equal(one.fc.weight, two.fc.weight)
    assert not torch.equal(one.fc.weight, other.fc.weight)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_base_optimizer_is_as_the_recipe_says():
    given = recipe("optimizer.momentum=0.8", "optimizer.nesterov=true", method="sgd")
    optimizer = build_optimizer(given, model_of(given), seed=0)
    assert type(optimizer) is SGD
    (group,) = optimizer.param_groups
    found = {key: group[key] for key in ("lr", "momentum", "weight_decay", "nesterov")}
    assert found == {"lr": 0.05, "momentum": 0.8, "weight_decay": 5e-4, "nesterov": True}
    given = recipe("optimizer.name=adamw", "optimizer.weight_decay=0.1", method="sgd")
    optimizer = build_optimizer(given, model_of(given), seed=0)
    assert type(optimizer) is AdamW
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_cram_is_as_the_recipe_says():
    given = recipe(
        "cram.rule=C-SAM",
        "cram.rho=0.3",
        "cram.sparse_gradients=false",
        "cram.normalize=false",
        "cram.mask_interval=4",
        "cram.base_step_probability=0.25",
        "cram.dense_ends=true",
        r"cram.skip=features\.6",
        "cram.operators=[int4, 'global:0.9']",
    )
    model = model_of(given)
    optimizer = build_optimizer(given, model, seed=5)
    assert isinstance(optimizer, CrAM)
    assert optimizer.rule is C_SAM
    assert (optimizer.rho, optimizer.base_step_probability) == (0.3, 0.25)
    assert (optimizer.sparse_gradients, optimizer.normalize) == (False, False)
    assert set(optimizer.weights) == {"features.3.weight"} == set(cram_weights(given, model))
    assert [str(one) for one in optimizer._sampler.operators] == ["int4", "global:0.9"]
    assert optimizer._sampler.mask_interval == 4
    same, other = (build_optimizer(given, model, seed=seed) for seed in (5, 6))
    states = [one.state_dict()["cram"]["generator"] for one in (optimizer, same, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_sam_needs_no_weights():
    given = recipe("cram.rule=SAM", "cram.operators=[]")
    optimizer = build_optimizer(given, model_of(given), seed=0)
    assert isinstance(optimizer, CrAM)
    assert optimizer.rule is SAM


def test_batches_are_those_of_the_recipe():
    given, data = recipe("train.batch_size=50"), digits(train=120, test=30)
    train = build_batches(given, data, train=True, device=CPU, seed=0)
    test = build_batches(given, data, train=False, device=CPU, seed=0)
    assert [len(labels) for _, labels in train.epoch(0)] == [50, 50]
    assert torch.cat([labels for _, labels in test.epoch(0)]).equal(data.test.labels)


def test_a_model_on_the_cpu_stays_as_it_is():
    model = model_of(recipe())
    assert to_device(model, CPU) is model
    assert model.features[3].weight.is_contiguous()


@pytest.mark.parametrize(
    ("operators", "chosen"),
    [
        (["global:0.5", "global:0.9"], "global:0.5"),
        (["global:0.3-0.9", "int4", "uniform:0.8"], "uniform:0.8"),
        (["int4", "global:0.5+int8"], "global:0.9"),
        ([], "global:0.9"),
    ],
)
def test_masks_are_watched_at_the_first_operator_that_only_prunes(operators, chosen):
    assert str(MaskChange({"w": torch.ones(4, 4)}, operators).operator) == chosen


def test_the_change_of_masks_is_counted_over_all_weights():
    weights = {"a": torch.arange(1.0, 7.0).view(2, 3), "b": torch.zeros(2, 2)}
    change = MaskChange(weights, ["global:0.5"])
    assert change.operator == GlobalTopK(0.5)  # keeps 2 to 6 of 10
    assert change.update() == 0
    weights["b"][0, 0] = 9.0  # in, and 2 is out
    assert change.update() == 2 / 10
    assert change.update() == 0


def test_machine_and_versions_are_named():
    assert machine_name(CPU).strip()
    found = versions()
    assert found["torch"] in torch.__version__
    assert found.keys() >= {"torchcram", "python"}
