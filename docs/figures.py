"""What the scripts that draw the pictures of the documentation share."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torchcram.experiments.evaluation.results import Result
    from torchcram.report.summary import MeanStd

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "results"
DESCRIPTION = "Description"
"""Key of the text in a PNG file that holds the numbers of the picture."""


@dataclass(frozen=True)
class Style:
    """Look of a method.

    Attributes:
        label: Name in legends and tables.
        color: Colour of its points and lines.
        marker: Marker of its points.
        line: Kind of its lines.
    """

    label: str
    color: str
    marker: str
    line: str = "-"

    @property
    def options(self) -> dict[str, str]:
        """Arguments of matplotlib, without the label."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.line}


STYLES = {
    "sgd": Style("SGD", "#d55e00", "s", "--"),
    "adam": Style("Adam", "#d55e00", "s", "--"),
    "sam": Style("SAM", "#e69f00", "v", "--"),
    "cram-plus-k50": Style("CrAM+-k50", "#56b4e9", "p"),
    "cram-plus-multi": Style("CrAM+, 2.0x", "#0072b2", "o"),
    "cram-plus-multi-1.5x": Style("CrAM+, 1.5x", "#009e73", "^"),
    "cram-plus-multi-1x": Style("CrAM+, 1.0x", "#cc79a7", "D"),
    "gradual-magnitude": Style("Gradual magnitude", "#333333", "P", ":"),
    "dpf": Style("DPF", "#8c564b", "X", ":"),
    "acdc": Style("AC/DC", "#7f3c8d", "*", ":"),
    "str": Style("STR", "#808000", "<", ":"),
    "sfw": Style("SFW", "#17becf", ">", ":"),
    "lottery-tickets": Style("Lottery tickets", "#999999", "h", ":"),
    "gradual-obs": Style("Gradual OBS", "#2ca02c", "d", ":"),
    "movement": Style("Movement", "#8c564b", "X", ":"),
    "soft-movement": Style("Soft movement", "#7f3c8d", "*", ":"),
    "platon": Style("PLATON", "#808000", "<", ":"),
    "l0": Style("l0 regularization", "#17becf", ">", ":"),
}
"""Styles by the names of methods, without their targets."""


def seed_deviation(result: Result, score: MeanStd) -> float:
    """Returns the standard deviation over the seeds; that over calibration sets does not count."""
    return score.std or 0.0 if len(result.seeds) > 1 else 0.0


def new_figure(
    rows: int, columns: int, *, size: tuple[float, float], font_size: int = 11
) -> tuple[Any, Any]:
    """Returns a figure of matplotlib that needs no display, and the array of its axes.

    Args:
        rows: Number of rows of axes.
        columns: Number of columns of axes.
        size: Width and height in inches.
        font_size: Size of the text in points.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {"font.size": font_size, "axes.spines.top": False, "axes.spines.right": False}
    )
    return pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)


def add_grid(axis: Any) -> None:  # noqa: ANN401
    """Draws light lines behind the points of axes."""
    axis.grid(color="#e4e4e4")
    axis.set_axisbelow(True)


def add_legend(figure: Any, axes: Iterable[Any], **options: Any) -> None:  # noqa: ANN401
    """Adds a legend to a figure with every label of its axes once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), frameon=False, **options)


def save(figure: Any, picture: Path, curves: object) -> None:  # noqa: ANN401
    """Writes a PNG file that carries its numbers as its description, and closes the figure."""
    from matplotlib import pyplot

    figure.savefig(picture, dpi=150, metadata={DESCRIPTION: json.dumps(curves)})
    pyplot.close(figure)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown whose first column is aligned to the left."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def section(kind: str, name: str, content: str) -> str:
    """Returns a section of a page, which begins and ends with an HTML comment."""
    return f"<!-- {kind}:{name} -->\n{content}\n<!-- end {kind} -->"


def update_section(text: str, kind: str, name: str, content: str) -> tuple[str, bool]:
    """Returns a page with new content in a section, and whether the page has that section."""
    pattern = rf"<!-- {re.escape(kind)}:{re.escape(name)} -->\n.*?<!-- end {re.escape(kind)} -->"
    new = section(kind, name, content)
    text, count = re.subn(pattern, lambda _: new, text, flags=re.S)
    return text, count > 0
