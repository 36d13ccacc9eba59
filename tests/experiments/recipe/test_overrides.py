from dataclasses import replace

import pytest
from runs import recipe

from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.recipe.overrides import (
    finetune_recipe,
    read_at,
    trains_sparse,
    transfer_recipe,
    with_epochs,
    with_length,
    with_overrides,
    with_targets,
)

CIFAR = load_recipe("cifar10/resnet20/cram-plus-multi")


@pytest.mark.parametrize(("epochs", "warmup"), [(1, 1), (5, 5), (300, 5)])
def test_epochs_take_warmup_along(epochs, warmup):
    changed = with_epochs(CIFAR, epochs)
    assert (changed.train.epochs, changed.schedule.warmup_epochs) == (epochs, warmup)
    assert with_epochs(CIFAR, None) is CIFAR


def test_trainings_of_several_lengths_have_names_of_their_own():
    changed = with_length(CIFAR, 40)
    assert changed.name == "cifar10/resnet20/cram-plus-multi-40-epochs"
    assert changed.title == "CrAM+-Multi, 40 epochs"
    assert with_length(CIFAR, 1).title == "CrAM+-Multi, 1 epoch"
    same = {"name": CIFAR.name, "title": CIFAR.title}
    assert replace(changed, **same) == with_epochs(CIFAR, 40)
    assert with_length(CIFAR, 3).schedule.warmup_epochs == 3
    long = load_recipe("squad/minilm-l6/cram-plus-multi-long-1x")
    assert with_length(long, 16).title == "CrAM+-Multi, 1.0x, 16 epochs"


def test_overrides_and_targets_are_put_in_strictly():
    assert with_overrides(CIFAR, ["cram.rho=0.3"]).cram.rho == 0.3
    with pytest.raises(ValueError, match=r"cram-plus-multi, with cram\.r=1: cram\.r is no known"):
        with_overrides(CIFAR, ["cram.r=1"])
    assert with_targets(CIFAR, ["int4"]).compress.to == ("int4",)
    with pytest.raises(ValueError, match="every operator once"):
        with_targets(CIFAR, ["int4", "int4"])


def test_finetuning_takes_a_tenth_by_plain_steps():
    found = finetune_recipe(CIFAR, "global:0.90")
    assert found.name == "cifar10/resnet20/cram-plus-multi-finetune-global-0.9"
    assert found.title == "CrAM+-Multi, fine-tuned at global:0.9"
    assert (found.train.epochs, found.schedule.warmup_epochs) == (20, 0)
    assert found.optimizer.lr == pytest.approx(CIFAR.optimizer.lr / 10)
    assert found.cram is None
    assert found.data == CIFAR.data
    assert Recipe.from_dict(found.to_dict()) == found
    assert finetune_recipe(recipe(epochs=3), "dense").train.epochs == 1


def test_finetuning_can_be_told_otherwise():
    changes = ["cram.operators=[nm:2:4]", "optimizer.lr=0.5", "schedule.warmup_epochs=2"]
    found = finetune_recipe(CIFAR, "dense", epochs=1, overrides=changes)
    assert (found.cram.operators, found.optimizer.lr) == (("nm:2:4",), 0.5)
    assert (found.train.epochs, found.schedule.warmup_epochs) == (1, 1)


def test_what_learns_from_the_dense_model_has_a_name_of_its_own():
    found = finetune_recipe(CIFAR, "global:0.9", overrides=["train.distillation={}"])
    assert found.name == "cifar10/resnet20/cram-plus-multi-finetune-distilled-global-0.9"
    assert found.title == "CrAM+-Multi, distilled at global:0.9"
    named = finetune_recipe(
        CIFAR, "global:0.9", overrides=["train.distillation={}", "name=cifar10/resnet20/mine"]
    )
    assert named.name == "cifar10/resnet20/mine"
    called = finetune_recipe(CIFAR, "global:0.9", overrides=["train.distillation={}", "title=Mine"])
    assert (called.name, called.title) == (found.name, "Mine")


def test_transfer_is_the_other_recipe_for_this_model():
    to = load_recipe("flowers102/resnet50/transfer")
    found = transfer_recipe(CIFAR, "global:0.8+int4", to, overrides=["train.batch_size=7"])
    assert found.name == "flowers102/resnet20/transfer-of-cram-plus-multi-global-0.8-int4"
    assert (found.model.name, found.model.pretrained) == ("resnet20", False)
    assert (found.data, found.optimizer, found.train.epochs) == (to.data, to.optimizer, 150)
    assert found.train.batch_size == 7
    assert Recipe.from_dict(found.to_dict()) == found


def test_the_method_of_a_sparse_model_is_not_used_again():
    method = "method={name: dpf, target: 'global:0.9', args: {end: 50 %}}"
    given = recipe(method, method="sgd")
    assert finetune_recipe(given, "dense").method is None
    found = transfer_recipe(given, "trained", load_recipe("cifar100/resnet20/transfer"))
    assert found.name == "cifar100/convnet-digits/transfer-of-sgd-global-0.9"
    assert (found.method, found.title) == (None, "SGD, transferred")
    with pytest.raises(ValueError, match="trains a dense model, which has no zeros of its own"):
        transfer_recipe(CIFAR, "trained", found)
    dense = recipe("method={name: compression-aware-sfw, target: 'global:0'}", method="sgd")
    assert (trains_sparse(given), trains_sparse(dense), trains_sparse(CIFAR)) == (
        True,
        False,
        False,
    )


def test_at_is_written_in_one_way():
    assert read_at(" dense ") == "dense"
    assert read_at("uniform:.50") == "uniform:0.5"
    with pytest.raises(ValueError, match="is a range"):
        read_at("global:0.3-0.9")
    with pytest.raises(ValueError, match="cannot read 'dens'"):
        read_at("dens")
