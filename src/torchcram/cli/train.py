"""torchcram train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import UsageError, errors_in_a_line, stoppable
from torchcram.cli.options import (
    DATA,
    Compile,
    DataFolder,
    DeviceName,
    Download,
    Eager,
    EvalInterval,
    Jobs,
    Parallel,
    ResultsFolder,
    Sets,
    check_jobs,
)
from torchcram.cli.progress import Style
from torchcram.cli.torchrun import processes


@app.command()
def train(
    recipes: Annotated[
        list[str],
        typer.Argument(
            metavar="RECIPE", help="Recipes: names as in `torchcram list recipes`, or files."
        ),
    ],
    data: DataFolder = DATA,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            show_default="runs/RECIPE/seedN",
            help="Folder of the run; of several runs, the folder that holds RECIPE/seedN.",
        ),
    ] = None,
    sets: Sets = None,
    seed: Annotated[
        list[int] | None,
        typer.Option(
            min=0, show_default="0", help="Seed of the run. Repeatable: a run for each seed."
        ),
    ] = None,
    epochs: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            show_default="that of the recipe",
            help="Number of epochs; 0 compresses the initial model. Repeatable: a run for each "
            "number, called RECIPE-N-epochs.",
        ),
    ] = None,
    device: DeviceName = "auto",
    start: Annotated[
        Path | None,
        typer.Option("--from", metavar="RUN", help="Start from the weights of a finished run."),
    ] = None,
    eager: Eager = False,
    compiled: Compile = False,
    eval_interval: EvalInterval = 1,
    sharded: Annotated[
        bool,
        typer.Option(
            "--sharded", help="Under torchrun, shard the parameters over the processes (FSDP2)."
        ),
    ] = False,
    parallel: Parallel = False,
    jobs: Jobs = None,
    results: ResultsFolder = None,
    download: Download = False,
    progress: Annotated[
        Style,
        typer.Option(
            help="Form of the progress; json prints a JSON object per update to standard output, "
            "and no table."
        ),
    ] = Style.auto,
) -> None:
    """Train by a recipe, then compress in one shot to all its targets and show the table.

    A training that was stopped continues with the same command. Under torchrun, all ranks train
    each run together.
    """
    with errors_in_a_line(), stoppable():
        from torchcram.cli.train_runs import TrainOptions, plan, train_in_parallel, train_in_turn
        from torchcram.experiments.ranks import joined

        check_jobs(jobs, parallel)
        if parallel and processes() > 1:
            raise UsageError(
                "--parallel and torchrun exclude each other: --parallel gives every run a process, "
                "torchrun gives every run several"
            )
        if compiled and processes() > 1:
            raise UsageError(
                f"--compile works in one process, and torchrun has started {processes()}"
            )
        if sharded and processes() == 1:
            raise UsageError("--sharded needs several processes, which torchrun starts")
        options = TrainOptions(
            data=data,
            sets=tuple(sets or ()),
            epochs=tuple(epochs or ()),
            device=device,
            start=start,
            eager=eager,
            compiled=compiled,
            eval_interval=eval_interval,
            results=results,
            download=download,
            sharded=sharded,
        )
        if parallel:
            train_in_parallel(plan(recipes, seed or [0], out, options), options, jobs)
            return
        with joined() as ranks:
            trainings = ranks.run_on_all(lambda: plan(recipes, seed or [0], out, options))
            train_in_turn(trainings, options, progress, ranks=ranks)
