"""The result of the demonstration as a table for the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torchcram.experiments.demo_result import DemoResult, Deployed

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


def deployed_table(result: DemoResult) -> Table:
    """Returns one line per net of CrAM+: its file, and how long a batch takes."""
    count = result.settings.timed_images
    table = Table(
        title=f"The nets of {result.trained[-1].method}: files, and ms for {count} images",
        caption="smaller: than the plain file of the dense net; one thread of the CPU",
    )
    table.add_column("compressed to", no_wrap=True)
    for column in ("file, kB", "smaller", "torch, ms", "runtime, ms", "speed"):
        table.add_column(column, justify="right", no_wrap=True)
    for place, one in enumerate(result.deployed):
        table.add_row(one.operator, *deployed_cells(result, one), end_section=place == 0)
    return table


def deployed_cells(result: DemoResult, one: Deployed) -> list[str]:
    """Returns the size of a file in kB, how much smaller it is, times in ms and their ratio."""
    speed = one.torch_ms / one.runtime_ms if one.torch_ms and one.runtime_ms else None
    return [
        f"{one.compact_bytes / 1000:.1f}",
        f"{result.deployed[0].plain_bytes / one.compact_bytes:.1f}x",
        "" if one.torch_ms is None else f"{one.torch_ms:.2f}",
        "" if one.runtime_ms is None else f"{one.runtime_ms:.2f}",
        "" if speed is None else f"{speed:.1f}x",
    ]
