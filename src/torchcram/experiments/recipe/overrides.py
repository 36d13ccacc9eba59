"""Changes to recipes: overrides, other targets, fine-tuning and transfer."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from torchcram.experiments.io import yaml_text
from torchcram.experiments.io.files import slug
from torchcram.experiments.recipe.schema import Recipe, StopConfig
from torchcram.pruners import parse_pruner

Overrides = tuple[str, ...]
"""Settings on top of a recipe, such as ("cram.rho=0.1", "train.epochs=3")."""

DENSE = "dense"  # in place of an operator: no compression
TRAINED = "trained"  # in place of an operator: the zeros that a method trained, held as they are
FINETUNE = "-finetune-"  # in names of fine-tuned recipes, before the target
DISTILLED = f"{FINETUNE}distilled-"  # in their names if the dense model is the teacher
LONGEST = 100  # characters of a folder's name
_LENGTH = re.compile(r", [0-9]+ epochs?$")  # at the end of a title
_SIMPLE = re.compile(r"[A-Za-z0-9._=+-]+")  # settings that are their own folder name


def with_epochs(recipe: Recipe, epochs: int | None) -> Recipe:
    """Returns a recipe with another number of epochs and a warm-up that is no longer than that.

    Args:
        recipe: Recipe to change.
        epochs: Number of epochs; None leaves the recipe unchanged.
    """
    if epochs is None:
        return recipe
    return replace(
        recipe,
        train=replace(recipe.train, epochs=epochs),
        schedule=replace(recipe.schedule, warmup_epochs=min(recipe.schedule.warmup_epochs, epochs)),
    )


def with_length(recipe: Recipe, epochs: int) -> Recipe:
    """Returns a recipe with another number of epochs, which its name and its title say.

    Trainings of several lengths have different results and folders that way.

    Args:
        recipe: Recipe to change. A number of epochs at the end of its title is replaced.
        epochs: Number of epochs.
    """
    title = f"{_LENGTH.sub('', recipe.title)}, {epochs} epoch{'s' * (epochs != 1)}"
    return replace(with_epochs(recipe, epochs), name=f"{recipe.name}-{epochs}-epochs", title=title)


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Returns a recipe changed by overrides such as "cram.rho=0.1".

    Raises:
        ValueError: If a key or a value is not allowed; the message names the key, what was given
            and what is allowed.
    """
    data = yaml_text.override(recipe.to_dict(), overrides)
    return Recipe.from_dict(data, f"{recipe.name}, with {' '.join(overrides)}")


def with_targets(recipe: Recipe, targets: Sequence[str]) -> Recipe:
    """Returns a recipe with other targets to compress to."""
    return replace(recipe, compress=replace(recipe.compress, to=tuple(targets)))


def finetune_recipe(
    recipe: Recipe, at: str, *, epochs: int | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """Returns the recipe that fine-tunes a compressed model on the data it was trained on.

    It takes plain steps of the base optimizer, for a tenth of the epochs from a tenth of the
    learning rate. For language models it takes two epochs, or as many as `recipe` has if that is
    fewer, from a learning rate of 5e-5, with early stopping.

    Args:
        recipe: Recipe that the model was trained with.
        at: Operator that the model is compressed by, as text, or "dense".
        epochs: Number of epochs; by default as above, and at least one.
        overrides: Further changes, such as "optimizer.lr=0.01".
    """
    at = read_at(at)
    defaults = recipe.build_task().finetuning(recipe.train.epochs, recipe.optimizer.lr)
    train = replace(recipe.train, epochs=defaults.epochs)
    if defaults.early_stopping:
        train = replace(train, early_stopping=StopConfig())
    tuning = replace(
        recipe,
        name=f"{recipe.name}{FINETUNE}{slug(at)}",
        title=f"{recipe.title}, fine-tuned at {at}",
        model=replace(recipe.model, pretrained=False),
        train=train,
        optimizer=replace(recipe.optimizer, lr=defaults.lr),
        schedule=replace(recipe.schedule, warmup_epochs=0),
        compress=recipe.compress if at == DENSE else replace(recipe.compress, watch=None),
        cram=None,
        method=None,
    )
    changed = with_epochs(with_overrides(tuning, overrides), epochs)
    if changed.train.distillation is None or changed.name != tuning.name:
        return changed
    title = changed.title
    if title == tuning.title:
        title = f"{recipe.title}, distilled at {at}"
    return replace(changed, name=f"{recipe.name}{DISTILLED}{slug(at)}", title=title)


def transfer_recipe(
    recipe: Recipe,
    at: str,
    to: Recipe,
    *,
    epochs: int | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """Returns the recipe that trains a compressed model on another dataset.

    Args:
        recipe: Recipe that the model was trained with; its model is kept, and all of it trained.
        at: Operator that the model is compressed by, as text, or "dense" or "trained".
        to: Recipe that has the dataset and all other settings.
        epochs: Number of epochs; by default that of `to`.
        overrides: Further changes, such as "optimizer.lr=0.01".
    """
    title = recipe.title
    if at == TRAINED:
        at = trained_target(recipe)
    else:
        at = read_at(at)
        title = f"{title} at {at}"
    transfer = replace(
        to,
        name=f"{to.task_name}/{recipe.architecture}/{to.method_name}-of-{recipe.method_name}-"
        f"{slug(at)}",
        title=f"{title}, transferred",
        model=replace(recipe.model, pretrained=False, freeze=None),
    )
    return with_epochs(with_overrides(transfer, overrides), epochs)


def read_at(at: str) -> str:
    """Returns the text of an operator in its canonical form: "uniform:.50" as "uniform:0.5".

    Args:
        at: Operator or pruner as text, or "dense".

    Raises:
        ValueError: If it cannot be read, or is a range.
    """
    if at.strip() == DENSE:
        return DENSE
    operator = parse_pruner(at)
    if operator.is_range:
        raise ValueError(f"{operator} is a range to train over; allowed: one sparsity or {DENSE!r}")
    return str(operator)


def trains_sparse(recipe: Recipe) -> bool:
    """Returns whether a method trains a sparse model; some train dense ones for all targets."""
    if recipe.method is None:
        return False
    return getattr(parse_pruner(recipe.method.target), "sparsity", None) != 0


def trained_target(recipe: Recipe) -> str:
    """Returns the target that the method of a recipe trains a sparse model for, as text.

    Raises:
        ValueError: If the recipe trains a dense model.
    """
    if recipe.method is None or not trains_sparse(recipe):
        raise ValueError(
            f"{recipe.name} trains a dense model, which has no zeros of its own; allowed: an "
            f"operator such as global:0.9, or {DENSE!r}"
        )
    return recipe.method.target


def folder_name(overrides: Overrides) -> str:
    """Returns the name of a folder for settings; different settings have different names."""
    name = ",".join(overrides)
    if all(map(_SIMPLE.fullmatch, overrides)) and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:8]
    return f"{slug(name)[:LONGEST]}-{digest}"
