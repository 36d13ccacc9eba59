"""Trainings of `torchcram train`: planned, then run one after another or in parallel."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import typer

from torchcram.cli.errors import UsageError
from torchcram.cli.options import (
    RUNS,
    RunOptions,
    check_epochs,
    check_sets,
    find_device,
    find_device_of,
    load,
    load_in,
    step_maker,
)
from torchcram.cli.output import show
from torchcram.cli.progress import Style, forward, say, watching
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.machine import cores, versions
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.recipe.overrides import with_epochs, with_length
from torchcram.experiments.results_store import (
    RESULT,
    add_to_results,
    check_results,
    load_or_measure,
)
from torchcram.experiments.training.parallel import Failure, Job, run_jobs, shared_gpu
from torchcram.experiments.training.trainer import Start, load_trained, train
from torchcram.report.results_table import result_table
from torchcram.report.sources import merge_seeds

if TYPE_CHECKING:
    from torchcram.experiments.evaluation.results import Result
    from torchcram.experiments.tasks import Dataset

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True)
class TrainOptions(RunOptions):
    """Options that all trainings of a command share; see `torchcram train --help`."""

    epochs: tuple[int, ...]
    start: Path | None
    compiled: bool
    sharded: bool = False


@dataclass(frozen=True)
class Training:
    """A training of the command.

    Attributes:
        source: Name or file of the recipe, as in the command.
        recipe: Recipe with all changes.
        seed: Seed of the run.
        folder: Folder of the run.
        name: Name of the training in the progress.
    """

    source: str
    recipe: Recipe
    seed: int
    folder: Path
    name: str


def plan(
    recipes: Sequence[str], seeds: Sequence[int], out: Path | None, options: TrainOptions
) -> list[Training]:
    """Returns all trainings, every seed of every recipe.

    Raises:
        ValueError: If any of them is not possible; none has begun by then.
    """
    find_device(options.device)
    check_epochs(options.epochs[0] if options.epochs else None, options.sets)
    check_sets(options.sets)
    step_maker(options.eager, options.compiled)
    loaded = [
        (source, recipe)
        for source in recipes
        for recipe in _lengths(load_recipe(source, options.sets), options.epochs)
    ]
    alone = len(loaded) * len(seeds) == 1
    methods = [recipe.method_name for _, recipe in loaded]
    trainings: list[Training] = []
    for source, recipe in loaded:
        for seed in seeds:
            below = (RUNS if out is None else out) / recipe.name / f"seed{seed}"
            folder = out if out is not None and alone else below
            if any(folder == training.folder for training in trainings):
                raise UsageError(f"{recipe.name} with seed {seed} is given twice")
            if options.results is not None:
                check_results(options.results, recipe, seed)
            name = recipe.method_name if methods.count(recipe.method_name) == 1 else recipe.name
            trainings.append(Training(source, recipe, seed, folder, f"{name} seed {seed}"))
    return trainings


def _lengths(recipe: Recipe, epochs: Sequence[int]) -> list[Recipe]:
    """Returns a recipe with each number of epochs; only several of them become part of its name."""
    if len(epochs) > 1:
        return [with_length(recipe, count) for count in epochs]
    return [with_epochs(recipe, epochs[0] if epochs else None)]


def train_in_turn(
    trainings: Sequence[Training], options: TrainOptions, style: Style, *, ranks: Ranks = SINGLE
) -> None:
    """Trains, compresses and shows the runs one after another.

    Args:
        trainings: Trainings to do.
        options: Options that they share.
        style: Form of the progress.
        ranks: Processes that share the work; rank 0 writes the files.

    Raises:
        ValueError: If ranks were given different work; none has begun by then.
    """
    ranks.require_same(_work(trainings, options))
    device = ranks.run_on_all(lambda: find_device_of(ranks, options.device))
    shows = ranks.is_first and style is not Style.json
    results = []
    if ranks.is_first and ranks.world_size > 1 and device.type == "cuda" and not options.eager:
        say("several processes take eager steps, without CUDA graphs")
    if options.compiled and device.type == "cpu":
        say("--compile has no effect on a CPU")
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
    """Returns what must be the same on all ranks; recipes by their position in the command."""
    return {
        "runs": len(trainings),
        **{
            f"run {number}": {"recipe": training.recipe.to_dict(), "seed": training.seed}
            for number, training in enumerate(trainings, 1)
        },
        "--from": None if options.start is None else str(options.start),
        "--eager": options.eager,
        "--sharded": options.sharded,
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
            sharded=options.sharded,
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


def train_in_parallel(
    trainings: Sequence[Training], options: TrainOptions, at_once: int | None
) -> None:
    """Trains all runs at the same time on one device, each in a process of its own.

    A failure is reported at the end, with exit status 1.

    Args:
        trainings: Trainings to do.
        options: Options that they share.
        at_once: Number of trainings at a time; by default all, if there are as many cores.
    """
    device = find_device(options.device)
    at_once = min(len(trainings), at_once or cores())
    for recipe in {training.recipe.data: training.recipe for training in trainings}.values():
        load(
            recipe, options.data, download=options.download
        )  # packs it once, before all processes need it
    jobs = {_job(training, options, device): training for training in trainings}
    environment = {THREADS: os.environ.get(THREADS, str(max(1, cores() // at_once)))}
    share = device.type == "cuda" and at_once > 1
    with shared_gpu(say, enabled=share) as gpu, watching() as watch:
        updates = {training.name: watch.training(training.name) for training in trainings}
        if watch.bars:
            for training in trainings:  # those that wait are shown too
                updates[training.name](0, training.recipe.train.epochs, None)
        failures = run_jobs(
            list(jobs),
            lambda job, line: forward(line, updates[job.name]),
            at_once=at_once,
            environment={**environment, **gpu},
        )
    failed = [failure.job for failure in failures]
    done = [training for job, training in jobs.items() if job not in failed]
    for result in merge_seeds([read_result(training.folder / RESULT) for training in done]):
        show(result_table(result))
    for training in done:
        typer.echo(f"run: {training.folder}")
    for failure in failures:
        say(failure_text(failure))
    if failures:
        raise typer.Exit(1)


def _job(training: Training, options: TrainOptions, device: torch.device) -> Job:
    """Returns the command of a training."""
    command = [sys.executable, "-m", "torchcram", "train", training.source, "--progress", "json"]
    command += ["--seed", str(training.seed), "--out", str(training.folder)]
    command += options.arguments(device)
    if options.epochs:
        command += ["--epochs", str(training.recipe.train.epochs)]
    if len(options.epochs) > 1:  # a command with one number of epochs would not name it
        recipe = training.recipe
        command += ["--set", f"name={recipe.name}", "--set", f"title={json.dumps(recipe.title)}"]
    if options.start is not None:
        command += ["--from", str(options.start)]
    if options.compiled:
        command += ["--compile"]
    return Job(training.name, tuple(command))


def failure_text(failure: Failure) -> str:
    """Returns the exit status and the last lines of a process that failed."""
    lines = "".join(f"\n  {line}" for line in failure.lines)
    return f"error: {failure.job.name} ended with exit status {failure.status}:{lines}"
