"""Files of the demonstration: a plot of accuracy against sparsity, a page and a Markdown table."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchcram.experiments.io.files import name_file_in_errors
from torchcram.files import written_aside
from torchcram.report import summary
from torchcram.report.markdown_tables import markdown_table
from torchcram.report.runs import runs_page
from torchcram.report.sources import read_benches, read_sources

if TYPE_CHECKING:
    from torchcram.experiments.evaluation.results import Result

PICTURE, PAGE, TABLE = "picture.png", "page.html", "table.md"
TITLE = "Train once, compress to any size"

# as on the page; distinct for colour-blind readers, and in print by marker and line style
STYLES = (
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
)
GREY = "#555555"


def write_demo(runs: Sequence[Path], folder: Path) -> dict[str, Path]:
    """Writes the picture, the page and the table; returns their paths by what they are.

    Args:
        runs: Folders of finished runs of one model on one dataset, with their benchmarks.
        folder: Folder that the files are written to; files of an earlier call are replaced.
    """
    results, logs = read_sources(runs)
    page = runs_page(results, title=TITLE, logs=logs, benches=read_benches(runs))
    methods = " ".join(result.method for result in results)
    table = markdown_table(results, f"{results[0].task}/{results[0].model} {methods}")
    contents = {PICTURE: accuracy_plot(results), PAGE: page.encode(), TABLE: table.encode()}
    write_files(folder, contents)
    return {"picture": folder / PICTURE, "page": folder / PAGE, "table": folder / TABLE}


def curves(results: Sequence[Result]) -> list[list[tuple[float, float]]]:
    """Returns (sparsity, accuracy after tuning) in percent for every result, dense first.

    Only targets of global sparsity: the others are not comparable along one axis.
    """
    return [
        [
            (0.0, 100 * summary.dense(result).mean),
            *sorted(
                (100 * row.sparsity, 100 * row.after.mean)
                for operator, row in summary.summaries(result).items()
                if summary.global_sparsity(operator)
            ),
        ]
        for result in results
    ]


def accuracy_plot(results: Sequence[Result]) -> bytes:
    """Draws the curves of two results; returns a PNG."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for result, curve, style in zip(results, curves(results), STYLES, strict=True):
        axes.plot(*zip(*curve, strict=True), label=_label(result), lw=2.2, ms=7, **style)  # type: ignore[arg-type]
    axes.set_title("One training, every sparsity", loc="left", fontsize=14, fontweight="bold")
    axes.set_xlabel("weights set to zero in one shot, %", fontsize=11)
    axes.set_ylabel("test accuracy after batch-norm tuning, %", fontsize=11)
    axes.set_xlim(-2, 100)
    axes.set_ylim(0, 103)
    axes.set_xticks(range(0, 101, 10))
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=GREY)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.legend(loc="lower left", frameon=False, fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _label(result: Result) -> str:
    epochs = summary.counted(int(summary.epochs(result)), "epoch")
    passes = ", two passes a step" if result.recipe.get("cram") else ""
    return f"{result.title}, {epochs}{passes}"


def write_files(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes all files aside, then moves them into place; after an error all are as before.

    Only the moves themselves, which need no space on the disk, come one after another.

    Args:
        folder: Folder that the files are written to; it is created if it does not exist.
        contents: Contents of the files by name.
    """
    with ExitStack() as written:
        for name, content in contents.items():
            path = folder / name
            written.enter_context(name_file_in_errors(path))
            written.enter_context(written_aside(path)).write_bytes(content)
