"""Output of commands: tables for the terminal, and results as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from torchcram.experiments.metrics import less_is_better
from torchcram.report.summary import in_percent, number, percent, score_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from rich.table import Table
    from rich.text import Text

    from torchcram.experiments.finetuning import AnyTrial, FineTuned, FinetuneTrial, Grid, Trial
    from torchcram.experiments.sweep import Point

STANDARD_OUTPUT = Path("-")

Write = Callable[["DataclassInstance"], None]
"""Writes a result as JSON and prints the path."""


@contextmanager
def result_output(path: Path | None) -> Iterator[Write]:
    """Opens the output that --json names, for a `with` block that shows and writes a result.

    With `-`, standard output holds the JSON alone: everything else that the block prints, tables
    and messages of libraries included, goes to standard error.

    Args:
        path: Path of the file, `-`, or None for no output. A missing folder is created at once, so
            that a command fails before the work rather than after it.
    """
    from torchcram.experiments.io import json_text
    from torchcram.experiments.io.files import name_file_in_errors, write_atomically

    def to_file(result: DataclassInstance) -> None:
        if path is not None:
            write_atomically(path, json_text.dump(result))
            typer.echo(f"result: {path}")

    def to_output(result: DataclassInstance) -> None:
        with name_file_in_errors("standard output"):
            typer.echo(json_text.dump(result), file=out, nl=False)

    if path != STANDARD_OUTPUT:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield to_file
        return
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        yield to_output


WIDEST = 1000  # characters of a table that nothing limits


def show(table: Table, narrow: Table | None = None) -> None:
    """Prints a table; into a pipe or a file at its full width.

    Args:
        table: Table to print.
        narrow: Table to print instead on a terminal that is too narrow for the other.
    """
    from rich.console import Console

    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=WIDEST)).maximum
    if not console.is_terminal:
        console.width = max(console.width, needed)
    elif narrow is not None and needed > console.width:
        table = narrow
    console.print(table)


def names_table(title: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Returns a table whose first column holds names, which are never wrapped."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for index, column in enumerate(header):
        table.add_column(column, no_wrap=index == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def finetuned_table(finetuned: FineTuned) -> Table:
    """Returns a row per stage from the trained model to the fine-tuned one."""
    from rich.table import Table
    from rich.text import Text

    origin, trained = finetuned.origin, finetuned.trained
    metric, tuned = trained.recipe.metric, trained.recipe.build_task().has_batchnorm
    table = Table(
        title=Text(
            f"{trained.recipe.title}: test {in_percent(metric)} on {trained.info.data.name}"
        ),
        caption="sparsity in % of the compressed weights and of all parameters",
    )
    table.add_column("model")
    for column in (metric, "sparsity", "of all"):
        table.add_column(column, justify="right", no_wrap=True)
    at_start = (percent(origin.sparsity), percent(origin.model_sparsity))
    if not origin.new_head:
        table.add_row("as it was trained", score_text(origin.dense, metric), "", "")
    if origin.holds_masks and origin.before is not None and origin.after is not None:
        before = score_text(origin.before, metric)
        table.add_row(Text(f"compressed to {origin.at}"), before, *at_start)
        if tuned:
            table.add_row("batch norm tuned", score_text(origin.after, metric), *at_start)
    what = "transferred" if origin.new_head else "fine-tuned"
    epochs = trained.finished.epochs or trained.recipe.train.epochs
    table.add_row(
        f"{what}, {number(epochs)} epoch{'s' * (epochs != 1)}",
        score_text(trained.finished.accuracy, metric),
        percent(finetuned.sparsity),
        percent(finetuned.model_sparsity),
    )
    return table


def grid_table(grid: Grid[FinetuneTrial]) -> Table:
    """Returns the settings of fine-tuning that were tried, best first, then the failed ones."""
    metric = grid.best.finetuned.trained.recipe.metric
    cells = [(score_text(trial.held_out, metric), str(trial.rounds)) for trial in grid.trials]
    title = f"{in_percent(metric)} on the held-out samples"
    return _trials_table(title, (metric, "rounds"), grid, cells)


def lr_table(name: str, search: Grid[Trial]) -> Table:
    """Returns the learning rates that a transfer tried, best first, then the failed ones."""
    from rich.text import Text

    title = Text(f"{name}: accuracy in % on the held-out tenth of the training set")
    cells = [(percent(trial.held_out),) for trial in search.trials]
    return _trials_table(title, ("accuracy",), search, cells)


def _trials_table(
    title: str | Text,
    columns: Sequence[str],
    grid: Grid[AnyTrial],
    cells: Iterable[Sequence[str]],
) -> Table:
    """Returns the settings of a grid with the cells of its trials, then the failed settings."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, caption="the first row was chosen")
    table.add_column("settings")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for trial, row in zip(grid.trials, cells, strict=True):
        table.add_row(Text(" ".join(trial.overrides)), *row)
    for overrides in grid.failed:
        table.add_row(Text(" ".join(overrides)), "failed")
    return table


def sweep_table(
    points: Sequence[Point], score: Sequence[str], *, targets: bool, metric: str = "accuracy"
) -> Table:
    """Returns the points of a sweep, best first.

    Args:
        points: Points, best first.
        score: Operators that were scored on; none for all targets.
        targets: Whether there is a column for every target.
        metric: Name of the metric of the scores.
    """
    from rich.table import Table
    from rich.text import Text

    measured = dict.fromkeys(operator for point in points for operator in point.targets)
    operators = list(measured) if targets else []
    average = "geometric mean" if less_is_better(metric) else "mean after batch-norm tuning"
    shown = in_percent(metric)
    table = Table(
        title=f"{shown[0].upper()}{shown[1:]} on the held-out tenth of the training set",
        caption=f"score: {average} over {', '.join(score) or 'all targets'}",
    )
    table.add_column("settings")
    for column in ("score", "dense", *operators):
        table.add_column(Text(column), justify="right", no_wrap=True)
    for point in points:
        values = [point.score, point.dense, *(point.targets.get(name) for name in operators)]
        cells = ["failed" if value is None else score_text(value, metric) for value in values]
        table.add_row(Text(" ".join(point.overrides)), *cells)
    return table
