"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchcram.report.summary import counted, percent

if TYPE_CHECKING:
    from rich.table import Table

    from torchcram.experiments.finetuning import FineTuned, Grid
    from torchcram.experiments.sweep import Point


WIDEST = 1000  # characters, where nothing limits a table


def show(table: Table, narrow: Table | None = None) -> None:
    """Prints a table; in a pipe or a file as wide as it is.

    Args:
        table: to print.
        narrow: to print instead on a terminal that is too small for the other.
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
    """Returns rows whose first column is a name, never broken."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for place, column in enumerate(header):
        table.add_column(column, no_wrap=place == 0)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def derived_table(derived: FineTuned) -> Table:
    """Returns the way from the finished model to the fine-tuned one."""
    from rich.table import Table
    from rich.text import Text

    origin, trained = derived.origin, derived.trained
    metric, tuned = trained.recipe.metric, trained.recipe.build_task().has_batchnorm
    table = Table(
        title=Text(f"{trained.recipe.title}: test {metric} in % on {trained.info.data.name}"),
        caption="sparsity in % of the compressed weights and of all parameters",
    )
    table.add_column("model")
    for column in (metric, "sparsity", "of all"):
        table.add_column(column, justify="right", no_wrap=True)
    at_start = (percent(origin.sparsity), percent(origin.model_sparsity))
    if not origin.new_head:
        table.add_row("as it was trained", percent(origin.dense), "", "")
    if origin.holds_masks and origin.before is not None and origin.after is not None:
        table.add_row(Text(f"compressed to {origin.at}"), percent(origin.before), *at_start)
        if tuned:
            table.add_row("batch norm tuned", percent(origin.after), *at_start)
    what = "transferred" if origin.new_head else "fine-tuned"
    table.add_row(
        f"{what}, {counted(trained.recipe.train.epochs, 'epoch')}",
        percent(trained.finished.accuracy),
        percent(derived.sparsity),
        percent(derived.model_sparsity),
    )
    return table


def grid_table(grid: Grid) -> Table:
    """Returns the settings of fine-tuning that were tried, best first, and those that failed."""
    from rich.table import Table
    from rich.text import Text

    metric = grid.trials[0].finetuned.trained.recipe.metric
    table = Table(
        title=f"{metric} in % on what was held out",
        caption="the first was chosen",
    )
    table.add_column("settings")
    for column in (metric, "rounds"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in grid.trials:
        table.add_row(Text(" ".join(one.overrides)), percent(one.held_out), str(one.rounds))
    for overrides in grid.failed:
        table.add_row(Text(" ".join(overrides)), "failed", "")
    return table


def sweep_table(points: Sequence[Point], score: Sequence[str], *, targets: bool) -> Table:
    """Returns the points of a sweep, best first.

    Args:
        points: sorted.
        score: the operators that were scored on; none for all targets.
        targets: whether to have a column for every one.
    """
    from rich.table import Table
    from rich.text import Text

    found = dict.fromkeys(operator for point in points for operator in point.targets)
    operators = list(found) if targets else []
    table = Table(
        title="Accuracy in % on the tenth of the training set that was held out",
        caption=f"score: mean after batch-norm tuning over {', '.join(score) or 'all targets'}",
    )
    table.add_column("settings")
    for column in ("score", "dense", *operators):
        table.add_column(Text(column), justify="right", no_wrap=True)
    for point in points:
        values = [point.score, point.dense, *(point.targets.get(one) for one in operators)]
        cells = ["failed" if value is None else percent(value) for value in values]
        table.add_row(Text(" ".join(point.overrides)), *cells)
    return table
