"""The result of the demonstration as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torchcram.experiments.demo_result import DemoResult

NOTICEABLE = 0.05  # a loss above this is set in bold red


def percent(fraction: float, digits: int = 1) -> str:
    """Writes 0.9876 as 98.8."""
    return f"{100 * fraction:.{digits}f}"


def points(change: float, digits: int = 1) -> str:
    """Writes a change of accuracy as signed percentage points: -1.2, +0.3, 0.0."""
    rounded = round(100 * change, digits)
    return f"{rounded:+.{digits}f}" if rounded else f"{0:.{digits}f}"


def demo_table(result: DemoResult) -> Table:
    """Returns one line per target: the accuracies of all methods and their change from dense."""
    images = f"{result.test_images} test images"
    table = Table(
        title=f"Test accuracy in % ({images}), compressed in one shot",
        caption="BNT: batch-norm statistics estimated anew; vs dense: BNT - dense",
    )
    table.add_column("compressed to", no_wrap=True)
    for trained in result.trained:
        for column in ("as is", "BNT", "vs dense"):
            table.add_column(f"{trained.method}\n{column}", justify="right", no_wrap=True)
    dense = [(percent(trained.accuracy), "", "") for trained in result.trained]
    table.add_row("dense", *(cell for cells in dense for cell in cells), end_section=True)
    for operator in result.settings.targets:
        cells: list[str | Text] = []
        for trained in result.trained:
            row = result.row(trained.method, operator)
            change = result.change(row)
            style = "bold red" if change < -NOTICEABLE else ""
            cells += [percent(row.before), percent(row.after), Text(points(change), style)]
        table.add_row(operator, *cells)
    return table
