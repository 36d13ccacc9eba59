"""The trainings that a command asks for, one after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from torchcram.cli.errors import UsageError
from torchcram.cli.options import (
    RUNS,
    check_epochs,
    check_sets,
    find_device,
    find_device_of,
    load_in,
    step_maker,
)
from torchcram.cli.progress import Style, watching
from torchcram.cli.tables import show
from torchcram.experiments.machine import versions
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.recipe.overrides import with_epochs
from torchcram.experiments.results_store import add_to_results, check_results, load_or_measure
from torchcram.experiments.training.trainer import Start, load_trained, train
from torchcram.report.results_table import result_table
from torchcram.report.sources import merge_seeds

if TYPE_CHECKING:
    from torchcram.experiments.evaluation.results import Result
    from torchcram.experiments.tasks import Dataset


@dataclass(frozen=True)
class TrainOptions:
    """What all trainings of a command have in common; see its options."""

    data: Path
    sets: tuple[str, ...]
    epochs: int | None
    device: str
    start: Path | None
    eager: bool
    compiled: bool
    eval_interval: int
    results: Path | None
    download: bool


@dataclass(frozen=True)
class Training:
    """One of them.

    Attributes:
        given: the recipe as the command has it.
        recipe: the same with all changes.
        seed: of the run.
        folder: of the run.
        name: that progress has it by.
    """

    given: str
    recipe: Recipe
    seed: int
    folder: Path
    name: str


def plan(
    recipes: Sequence[str], seeds: Sequence[int], out: Path | None, options: TrainOptions
) -> list[Training]:
    """Returns all trainings, every seed of every recipe.

    Raises:
        ValueError: if one cannot be, before any is begun.
    """
    find_device(options.device)
    check_epochs(options.epochs, options.sets)
    check_sets(options.sets)
    step_maker(options.eager, options.compiled)
    loaded = [with_epochs(load_recipe(one, options.sets), options.epochs) for one in recipes]
    alone = len(recipes) * len(seeds) == 1
    methods = [recipe.method for recipe in loaded]
    trainings: list[Training] = []
    for given, recipe in zip(recipes, loaded, strict=True):
        for seed in seeds:
            below = (RUNS if out is None else out) / recipe.name / f"seed{seed}"
            folder = out if out is not None and alone else below
            if any(folder == one.folder for one in trainings):
                raise UsageError(f"{recipe.name} with seed {seed} is asked for twice")
            if options.results is not None:
                check_results(options.results, recipe, seed)
            name = recipe.method if methods.count(recipe.method) == 1 else recipe.name
            trainings.append(Training(given, recipe, seed, folder, f"{name} seed {seed}"))
    return trainings


def train_in_turn(
    trainings: Sequence[Training], options: TrainOptions, style: Style, *, ranks: Ranks = SINGLE
) -> None:
    """Trains, compresses and shows one after another.

    Args:
        trainings: what to do.
        options: of all of them.
        style: of the progress.
        ranks: Processes that share the work; rank 0 writes the files.

    Raises:
        ValueError: if processes are given different work, before any of it is begun.
    """
    ranks.require_same(_work(trainings, options))
    device = ranks.run_on_all(lambda: find_device_of(ranks, options.device))
    shows = ranks.is_first and style is not Style.json
    results = []
    if ranks.is_first and ranks.world_size > 1 and device.type == "cuda" and not options.eager:
        typer.echo("several processes take plain steps, without CUDA graphs", err=True)
    for training in trainings:
        results.append(_train(training, options, style, device=device, ranks=ranks))
        if shows:
            show(result_table(results[-1]))
            typer.echo(f"run: {training.folder}")
    if shows:
        for result in merge_seeds(results):
            if len(result.seeds) > 1:
                show(result_table(result))


def _work(trainings: Sequence[Training], options: TrainOptions) -> dict[str, Any]:
    """Returns what all processes are to be given alike; recipes by their place in the command."""
    return {
        "runs": len(trainings),
        **{
            f"run {place}": {"recipe": one.recipe.to_dict(), "seed": one.seed}
            for place, one in enumerate(trainings, 1)
        },
        "--from": None if options.start is None else str(options.start),
        "--eager": options.eager,
        "--eval-interval": options.eval_interval,
        "versions": {name: versions().get(name) for name in ("torchcram", "torch")},
    }


def _train(
    training: Training, options: TrainOptions, style: Style, *, device: torch.device, ranks: Ranks
) -> Result:
    recipe, folder = training.recipe, training.folder
    data = load_in(ranks, recipe, options.data, download=options.download)
    start = None
    if options.start is not None:
        origin = options.start
        start = ranks.broadcast_from_rank0(lambda: _start(origin, recipe, data))
    with watching(style, silent=not ranks.is_first) as watch:
        trained = train(
            recipe,
            folder,
            data=data,
            seed=training.seed,
            device=device,
            start=start,
            eval_interval=options.eval_interval,
            make_step=step_maker(options.eager, options.compiled),
            progress=watch.training(training.name),
            ranks=ranks,
        )
        pieces = watch.pieces("compressing", len(recipe.compress.to))
        result = load_or_measure(folder, trained, data, device=device, progress=pieces, ranks=ranks)
    if options.results is not None and ranks.is_first:
        add_to_results(options.results, recipe, result.seeds[0])
    return result


def _start(folder: Path, recipe: Recipe, data: Dataset) -> Start:
    """Returns the weights of a finished run, for a training of the same model."""
    trained = load_trained(folder, torch.device("cpu"))
    ours, theirs = recipe.model, trained.recipe.model
    if ours.name != theirs.name:
        raise ValueError(
            f"--from {folder}: its model is {theirs.name!r}, that of {recipe.name} is {ours.name!r}"
        )
    if (ours.args or {}) != (theirs.args or {}):
        raise ValueError(
            f"--from {folder}: its model.args is {theirs.args!r}, that of {recipe.name} is "
            f"{ours.args!r}"
        )
    known, needed = len(trained.info.data.classes), len(data.classes)
    if known != needed:
        raise ValueError(
            f"--from {folder}: it has {known} classes, {data.name!r} has {needed}; "
            "`torchcram transfer` gives it a new head"
        )
    return Start(trained.model)
