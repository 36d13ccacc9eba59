"""The result of the demonstration as a picture: accuracy against sparsity."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchcram import CRAM_PLUS, GlobalTopK, parse_operator

if TYPE_CHECKING:
    from torchcram.experiments.demo_result import DemoResult

# told apart by colour-blind readers, and in print by marker and line style
STYLES = (
    {"color": "#D55E00", "marker": "s", "linestyle": "--"},
    {"color": "#0072B2", "marker": "o", "linestyle": "-"},
)
GREY = "#555555"


def curves(result: DemoResult) -> dict[str, list[tuple[float, float]]]:
    """Returns (sparsity, accuracy after tuning) in percent for every method, dense first.

    Only targets of global sparsity: the others are not comparable along one axis.
    """
    pruned = [t for t in result.settings.targets if isinstance(parse_operator(t), GlobalTopK)]
    found = {}
    for trained in result.trained:
        rows = [result.row(trained.method, target) for target in pruned]
        measured = sorted((row.sparsity, row.after) for row in rows)
        found[trained.method] = [(100 * x, 100 * y) for x, y in [(0, trained.accuracy), *measured]]
    return found


def demo_picture(result: DemoResult) -> bytes:
    """Draws the curves; returns a PNG."""
    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    epochs = {trained.method: trained.epochs for trained in result.trained}
    for (method, curve), style in zip(curves(result).items(), STYLES, strict=True):
        axes.plot(*zip(*curve, strict=True), label=_label(method, epochs), lw=2.2, ms=7, **style)  # type: ignore[arg-type]
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


def _label(method: str, epochs: dict[str, int]) -> str:
    plural = "" if epochs[method] == 1 else "s"
    passes = ", two passes a step" if method == CRAM_PLUS.name else ""
    return f"{method}, {epochs[method]} epoch{plural}{passes}"
