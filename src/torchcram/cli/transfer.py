"""torchcram transfer and torchcram transfers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import UsageError, errors_in_a_line, stoppable, usage
from torchcram.cli.options import (
    DATA,
    DataFolder,
    DeviceName,
    Download,
    Eager,
    Epochs,
    EvalInterval,
    Jobs,
    NewRunFolder,
    NewRunSeed,
    Parallel,
    ResultFile,
    ResultsFolder,
    RunOptions,
    Sets,
    check_epochs,
    check_jobs,
    check_sets,
    find_device,
    load,
    step_maker,
)
from torchcram.cli.progress import Style, say
from torchcram.cli.report import RESULTS

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.evaluation.results import Result
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.parallel import Job
    from torchcram.experiments.transfer import Transfer, Transferred


@dataclass(frozen=True)
class TransferOptions(RunOptions):
    """Options that all transfers of a command share; see `torchcram transfer --help`."""

    lrs: tuple[float, ...]
    epochs: int | None


@app.command()
def transfer(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", file_okay=False, help="Folders of finished runs."),
    ],
    to: Annotated[
        list[str],
        typer.Option(metavar="RECIPE", help="Recipe of the other task. Repeatable."),
    ],
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP",
            help="Operator such as global:0.9 whose zeros are kept, or dense. Repeatable. Not "
            "needed for runs that a method trained sparse.",
        ),
    ] = None,
    lr: Annotated[
        list[float] | None,
        typer.Option(
            show_default="that of RECIPE",
            help="Learning rate. Repeatable: the best on a tenth of the training set, which is "
            "held out for the choice, is trained on the whole training set.",
        ),
    ] = None,
    dense: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="RUN",
            file_okay=False,
            show_default="the plain one of the runs",
            help="Run with a dense model that sparse runs are compared with. Repeatable.",
        ),
    ] = None,
    epochs: Epochs = None,
    sets: Sets = None,
    out: NewRunFolder = None,
    seed: NewRunSeed = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    eager: Eager = False,
    eval_interval: EvalInterval = 1,
    parallel: Parallel = False,
    jobs: Jobs = None,
    results: ResultsFolder = None,
    json: ResultFile = None,
    download: Download = False,
    progress: Annotated[Style, typer.Option(hidden=True)] = Style.auto,
    compared_with: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Compress trained models, give them new heads, and train them on other data, masks held.

    The model is that of RUN; everything else follows RECIPE. Every run at every sparsity on every
    task is a run of its own, which continues where it was stopped. At the end, a table shows how
    much the errors of sparse models exceed those of the dense model of the same source.
    """
    with errors_in_a_line(), stoppable():
        from torchcram.cli.output import result_output, show
        from torchcram.experiments.recipe import load_recipe
        from torchcram.experiments.transfer import check_transfers, plan_transfers, read_source
        from torchcram.report.transfer import summarize, transfer_table

        check_epochs(epochs, sets)
        check_sets(sets)
        check_lrs(lr or (), sets or ())
        check_operators(at or ())
        check_jobs(jobs, parallel)
        options = TransferOptions(
            data=data,
            sets=tuple(sets or ()),
            lrs=tuple(lr or ()),
            epochs=epochs,
            device=device,
            eager=eager,
            eval_interval=eval_interval,
            results=results,
            download=download,
        )
        find_device(device)
        sources = [read_source(run) for run in runs]
        sparse = any(source.is_sparse for source in sources)
        if not at and not sparse:
            raise UsageError("--at is missing: no run was trained sparse by a method")
        if dense and not sparse:
            raise UsageError("--dense is for runs that a method trained sparse, and there are none")
        items = plan_transfers(
            sources,
            at or (),
            {name: load_recipe(name) for name in to},
            dense=[read_source(run) for run in dense or ()],
            compared_with=compared_with,
            lrs=options.lrs,
            epochs=epochs,
            overrides=options.sets,
            out=out,
            seed=seed,
        )
        check_results_of(items, results)
        datasets = check_transfers(items, lambda recipe: load(recipe, data, download=download))
        with result_output(json) as write:
            if parallel:
                shown, failed = _in_parallel(items, options, jobs)
            else:
                shown, failed = _in_turn(items, datasets, options, progress)
            summary = summarize(shown)
            if len(items) > 1 and shown and progress is not Style.json:
                show(transfer_table(summary))
                for item in items:
                    typer.echo(f"run: {item.folder}")
            write(summary)
        if failed:
            raise typer.Exit(1)


@app.command()
def transfers(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH",
            show_default="results",
            help="Folders of results, result files, folders of runs.",
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the table in Markdown.")
    ] = False,
    json: ResultFile = None,
) -> None:
    """Show the results of transfers: sparse models compared with dense ones, on every task."""
    with errors_in_a_line():
        from torchcram.cli.output import result_output, show
        from torchcram.report.markdown_tables import transfer_markdown
        from torchcram.report.transfer import read_transfers, summarize, transfer_table

        summary = summarize(read_transfers(paths or [RESULTS]))
        with result_output(json) as write:
            if markdown:
                typer.echo(transfer_markdown(summary), nl=False)
            else:
                show(transfer_table(summary))
            write(summary)


def check_lrs(lrs: Sequence[float], sets: Sequence[str]) -> None:
    """Raises UsageError for learning rates that are not above 0, or are given twice."""
    if any(not 0 < lr < float("inf") for lr in lrs):
        raise UsageError(f"--lr {min(lrs)}: allowed are numbers above 0")
    if len(set(lrs)) < len(lrs):
        raise UsageError("--lr: every learning rate is allowed once")
    if lrs and any(text.partition("=")[0].strip() == "optimizer.lr" for text in sets):
        raise UsageError("--lr and optimizer.lr exclude each other: they set the same value")


def check_operators(ats: Sequence[str]) -> None:
    """Raises UsageError for operators that cannot be read, or are given twice."""
    from torchcram.experiments.recipe.overrides import TRAINED, read_at

    with usage():
        read = [at if at == TRAINED else read_at(at) for at in ats]
    if len(set(read)) < len(read):
        raise UsageError(f"--at: every operator is allowed once, got {', '.join(read)}")


def check_results_of(items: Sequence[Transfer], results: Path | None) -> None:
    """Raises ValueError if the results of a transfer could not be added to earlier ones."""
    from torchcram.experiments.results_store import check_results

    for item in items if results is not None else ():
        check_results(results or RESULTS, item.recipe, item.seed)


def _in_turn(
    items: Sequence[Transfer],
    datasets: dict[str, Dataset],
    options: TransferOptions,
    style: Style,
) -> tuple[list[Result], bool]:
    """Does transfers one after another; of several, one that fails does not stop the others.

    Returns:
        Results of those that succeeded, and whether one failed.
    """
    from torchcram.cli.progress import watching
    from torchcram.experiments.results_store import add_to_results
    from torchcram.experiments.transfer import run_transfer

    shown: list[Result] = []
    alone = len(items) == 1
    for item in items:
        try:
            with watching(style) as watch:
                done = run_transfer(
                    item,
                    datasets[item.target],
                    device=find_device(options.device),
                    make_step=step_maker(options.eager),
                    eval_interval=options.eval_interval,
                    progress=watch.training,
                )
        except FloatingPointError as error:
            if alone:
                raise
            say(f"error: {item.name}: {error}")
            continue
        if style is not Style.json:
            _show(done, alone=alone)
        if options.results is not None:
            path = add_to_results(options.results, item.recipe, done.seed_result)
            if style is not Style.json:
                typer.echo(f"result: {path}")
        shown.append(done.result)
    return shown, len(shown) < len(items)


def _show(done: Transferred, *, alone: bool) -> None:
    from torchcram.cli.output import finetuned_table, lr_table, show
    from torchcram.report.results_table import result_table
    from torchcram.report.summary import percent

    if not alone:
        if done.search is not None:
            best = done.search.best
            chosen = f"{' '.join(best.overrides)}, {percent(best.held_out)} % held out"
            say(f"{done.transfer.name}: {chosen}")
        return
    if done.search is not None:
        show(lr_table(done.transfer.name, done.search))
    show(finetuned_table(done.finetuned))
    if not done.finetuned.origin.holds_masks:  # still dense: it can be compressed to anything
        show(result_table(done.result))
    typer.echo(f"run: {done.transfer.folder}")


def _in_parallel(
    items: Sequence[Transfer], options: TransferOptions, at_once: int | None
) -> tuple[list[Result], bool]:
    """Does all transfers at the same time on one device, each in a process of its own.

    Returns:
        Results of those that succeeded, and whether one failed.
    """
    from torchcram.cli.progress import forward_all, watching
    from torchcram.cli.train_runs import THREADS, failure_text
    from torchcram.experiments.evaluation.results import read_result
    from torchcram.experiments.machine import cores
    from torchcram.experiments.results_store import RESULT
    from torchcram.experiments.training.parallel import run_jobs, shared_gpu

    device = find_device(options.device)
    at_once = min(len(items), at_once or cores())
    made = {_job(item, options, device): item for item in items}
    environment = {THREADS: os.environ.get(THREADS, str(max(1, cores() // at_once)))}
    share = device.type == "cuda" and at_once > 1
    with shared_gpu(say, enabled=share) as gpu, watching() as watch:
        training = cache(watch.training)  # a name has one bar
        failures = run_jobs(
            list(made),
            lambda _, line: forward_all(line, training),
            at_once=at_once,
            environment={**environment, **gpu},
        )
    failed = [failure.job for failure in failures]
    done = [item for job, item in made.items() if job not in failed]
    for failure in failures:
        say(failure_text(failure))
    return [read_result(item.folder / RESULT) for item in done], bool(failures)


def _job(item: Transfer, options: TransferOptions, device: torch.device) -> Job:
    """Returns the command of a transfer."""
    from torchcram.experiments.training.parallel import Job

    command = [sys.executable, "-m", "torchcram", "transfer", str(item.source.folder)]
    command += ["--at", item.at, "--to", item.given, "--out", str(item.folder)]
    command += ["--seed", str(item.seed), "--compared-with", item.dense, "--progress", "json"]
    command += options.arguments(device)
    for lr in options.lrs:
        command += ["--lr", repr(lr)]
    if options.epochs is not None:
        command += ["--epochs", str(options.epochs)]
    return Job(item.name, tuple(command))
