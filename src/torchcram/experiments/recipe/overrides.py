"""Recipes made out of other recipes."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import replace

from torchcram.experiments.io import yaml_text
from torchcram.experiments.recipe.schema import Recipe, StopConfig
from torchcram.pruners import parse_pruner

Overrides = tuple[str, ...]
"""Settings on top of a recipe, such as ("cram.rho=0.1", "train.epochs=3")."""

DENSE = "dense"  # in place of an operator: no compression
FINETUNE = "-finetune-"  # in the name of a recipe, followed by the target
DISTILLED = f"{FINETUNE}distilled-"  # the same, where the dense model was the teacher
LONGEST = 100  # characters of a folder's name
_SIMPLE = re.compile(r"[A-Za-z0-9._=+-]+")  # settings that are their own folder name


def with_epochs(recipe: Recipe, epochs: int | None) -> Recipe:
    """Returns the recipe with so many epochs and no more of warm-up; None leaves it as it is."""
    if epochs is None:
        return recipe
    return replace(
        recipe,
        train=replace(recipe.train, epochs=epochs),
        schedule=replace(recipe.schedule, warmup_epochs=min(recipe.schedule.warmup_epochs, epochs)),
    )


def with_overrides(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """Returns the recipe with overrides such as "cram.rho=0.1" put in.

    Raises:
        ValueError: naming the key, what was given and what is allowed.
    """
    data = yaml_text.override(recipe.to_dict(), overrides)
    return Recipe.from_dict(data, f"{recipe.name}, with {' '.join(overrides)}")


def with_targets(recipe: Recipe, targets: Sequence[str]) -> Recipe:
    """Returns the recipe with other targets to compress to."""
    return replace(recipe, compress=replace(recipe.compress, to=tuple(targets)))


def finetune_recipe(
    recipe: Recipe, at: str, *, epochs: int | None = None, overrides: Sequence[str] = ()
) -> Recipe:
    """Returns the recipe for training on: the same data, plain steps, a tenth of everything.

    With texts it is two epochs, at most those of `recipe`, from 5e-5, ended early.

    Args:
        recipe: by which the model was trained.
        at: operator as text, or "dense".
        epochs: instead of a tenth of those of `recipe`, at least one.
        overrides: on top of it, such as "optimizer.lr=0.01".
    """
    at = read_at(at)
    defaults = recipe.build_task().finetuning(recipe.train.epochs, recipe.optimizer.lr)
    train = replace(recipe.train, epochs=defaults.epochs)
    if defaults.early_stopping:
        train = replace(train, early_stopping=StopConfig())
    shorter = replace(
        recipe,
        name=f"{recipe.name}{FINETUNE}{as_name(at)}",
        title=f"{recipe.title}, fine-tuned at {at}",
        model=replace(recipe.model, pretrained=False),
        train=train,
        optimizer=replace(recipe.optimizer, lr=defaults.lr),
        schedule=replace(recipe.schedule, warmup_epochs=0),
        compress=recipe.compress if at == DENSE else replace(recipe.compress, watch=None),
        cram=None,
    )
    given = with_epochs(with_overrides(shorter, overrides), epochs)
    if given.train.distillation is None or given.name != shorter.name:
        return given
    name, title = f"{recipe.name}{DISTILLED}{as_name(at)}", f"{recipe.title}, distilled at {at}"
    return replace(given, name=name, title=title if given.title == shorter.title else given.title)


def transfer_recipe(
    recipe: Recipe,
    at: str,
    to: Recipe,
    *,
    epochs: int | None = None,
    overrides: Sequence[str] = (),
) -> Recipe:
    """Returns the recipe `to` for the model of `recipe`, whose weights it starts from.

    Args:
        recipe: by which the model was trained.
        at: operator as text, or "dense".
        to: data, epochs, learning rate.
        epochs: instead of those of `to`.
        overrides: on top of it.
    """
    at = read_at(at)
    moved = replace(
        to,
        name=f"{to.task_name}/{recipe.architecture}/{to.method}-of-{recipe.method}-{as_name(at)}",
        title=f"{recipe.title} at {at}, transferred",
        model=replace(recipe.model, pretrained=False),
    )
    return with_epochs(with_overrides(moved, overrides), epochs)


def read_at(at: str) -> str:
    """Returns an operator, or "dense", as it is written everywhere.

    Raises:
        ValueError: if it cannot be read or is a range.
    """
    if at.strip() == DENSE:
        return DENSE
    operator = parse_pruner(at)
    if operator.is_range:
        raise ValueError(f"{operator} is a range to train over; give one sparsity, or {DENSE!r}")
    return str(operator)


def as_name(text: str) -> str:
    """Returns a text as part of a file name: global:0.9 as global-0.9."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text)


def folder_name(overrides: Overrides) -> str:
    """Returns the name of a folder for settings; different settings have different names."""
    name = ",".join(overrides)
    if all(map(_SIMPLE.fullmatch, overrides)) and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(json.dumps(overrides).encode()).hexdigest()[:8]
    return f"{as_name(name)[:LONGEST]}-{digest}"
