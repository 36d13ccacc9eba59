"""The trainings that a command asks for, each in a process of its own, at the same time."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from torchcram.cli.options import find_device, load
from torchcram.cli.progress import hear, watching
from torchcram.cli.tables import show
from torchcram.cli.train_runs import Training, TrainOptions
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.machine import cores
from torchcram.experiments.results_store import RESULT
from torchcram.experiments.training.parallel import Failure, Job, run_jobs, shared_gpu
from torchcram.report.results_table import result_table
from torchcram.report.sources import merge_seeds

THREADS = "OMP_NUM_THREADS"


def train_together(
    trainings: Sequence[Training], options: TrainOptions, at_once: int | None
) -> None:
    """Trains all, on one device; a failure is told at the end and ends with exit status 1.

    Args:
        trainings: what to do.
        options: of all of them.
        at_once: how many at a time; by default all, if there are as many cores.
    """
    device = find_device(options.device)
    at_once = min(len(trainings), at_once or cores())
    for recipe in {training.recipe.data: training.recipe for training in trainings}.values():
        load(recipe, options.data, download=options.download)  # packs it once, before all need it
    jobs = {_job(training, options, str(device)): training for training in trainings}
    environment = {THREADS: os.environ.get(THREADS, str(max(1, cores() // at_once)))}
    share = device.type == "cuda" and at_once > 1
    with shared_gpu(_say, enabled=share) as gpu, watching() as watch:
        tells = {training.name: watch.training(training.name) for training in trainings}
        if watch.bars:
            for training in trainings:  # those that wait show too
                tells[training.name](0, training.recipe.train.epochs, None)
        failures = run_jobs(
            list(jobs),
            lambda job, line: hear(tells[job.name], line),
            at_once=at_once,
            environment={**environment, **gpu},
        )
    failed = [failure.job for failure in failures]
    done = [training for job, training in jobs.items() if job not in failed]
    for result in merge_seeds([read_result(one.folder / RESULT) for one in done]):
        show(result_table(result))
    for one in done:
        typer.echo(f"run: {one.folder}")
    for failure in failures:
        _say(_told(failure))
    if failures:
        raise typer.Exit(1)


def _job(training: Training, options: TrainOptions, device: str) -> Job:
    """Returns the command for one training; the data is there by then, so nothing downloads."""
    command = [sys.executable, "-m", "torchcram", "train", training.given, "--progress", "json"]
    command += ["--seed", str(training.seed), "--out", str(training.folder)]
    command += ["--data", str(options.data), "--device", device]
    command += ["--eval-interval", str(options.eval_interval)]
    for text in options.sets:
        command += ["--set", text]
    if options.epochs is not None:
        command += ["--epochs", str(options.epochs)]
    if options.start is not None:
        command += ["--from", str(options.start)]
    if options.results is not None:
        command += ["--results", str(options.results)]
    if options.eager:
        command += ["--eager"]
    if options.compiled:
        command += ["--compile"]
    return Job(training.name, tuple(command))


def _told(failure: Failure) -> str:
    said = "".join(f"\n  {line}" for line in failure.lines)
    return f"error: {failure.job.name} ended with exit status {failure.status}:{said}"


def _say(line: str) -> None:
    typer.echo(line, err=True)
