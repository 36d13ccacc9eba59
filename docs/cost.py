"""Draws docs/cost.png: what it costs to serve several sparsities, and the accuracy at each.

The left axes of a row show the passes of all trainings that the first 1, 2, ... sparsities need,
the right ones the accuracy at each sparsity. The numbers are those of `torchcram costs`, from the
files `results/<task>/<model>/<method>.json`; what is missing there is left out:

    torchcram train cifar10-jpeg/resnet20/dpf-k50 cifar10-jpeg/resnet20/dpf-k70 --results results

Their tables are sections of docs/baselines.md, which `torchcram results --write` updates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import figures
from figures import RESULTS

from torchcram.experiments.evaluation.results import read_results
from torchcram.report import summary
from torchcram.report.costs import CostComparison, MethodCost, compare_costs

PICTURE = figures.DOCS / "cost.png"
OURS = "cram-plus"  # methods whose names begin so are CrAM+
SHOWN = ("", "fine-tuned")  # what follows a training in the picture
ROOM = 0.5  # points beyond the scores of CrAM+ and of the methods for one target each


@dataclass(frozen=True)
class Panel:
    """A row of the picture.

    Attributes:
        title: Model and dataset in words.
        targets: Targets, in the order in which they are served.
        methods: Names of the styles of methods, by their names in recipes.
    """

    title: str
    targets: tuple[str, ...]
    methods: Mapping[str, str]


def _named(*names: str) -> dict[str, str]:
    return {name: name for name in names}


PANELS = {
    "cifar10-jpeg/resnet20": Panel(
        "ResNet20 on CIFAR-10 (as JPEG)",
        targets=tuple(f"global:{level}" for level in (0.5, 0.7, 0.8, 0.9, 0.95)),
        methods=_named("cram-plus-multi", "cram-plus-multi-1x", "sgd", "sfw")
        | _named("gradual-magnitude", "dpf", "acdc", "str"),
    ),
    "squad/minilm-l6": Panel(
        "6-layer encoder on SQuAD",
        targets=tuple(f"uniform:{level}" for level in (0.5, 0.6, 0.7, 0.8)),
        methods={
            "cram-plus-multi-long": "cram-plus-multi",
            "cram-plus-multi-long-1x": "cram-plus-multi-1x",
            "adam-long": "adam",
        }
        | _named("gradual-magnitude", "movement", "soft-movement", "platon", "l0", "gradual-obs"),
    ),
}


def read_panels(results: Path = RESULTS) -> dict[str, CostComparison]:
    """Returns all that the picture shows.

    A panel is left out unless it has CrAM+ and a method that trains for each target.
    """
    read, known = read_results(results), {}
    for name, panel in PANELS.items():
        own = [result for result in read if f"{result.task}/{result.model}" == name]
        for comparison in compare_costs(own, panel.targets).comparisons:
            chosen = comparison.of(list(panel.methods))
            methods = tuple(cost for cost in chosen.methods if cost.after in SHOWN)
            kinds = {(cost.method.startswith(OURS), cost.per_target) for cost in methods}
            if {(True, False), (False, True)} <= kinds:
                known[name] = replace(chosen, methods=methods)
    return known


def described(panels: Mapping[str, CostComparison]) -> dict[str, Any]:
    """Returns the numbers of the picture, which the PNG file carries as its description."""
    return {
        name: {
            f"{cost.method}, {cost.after}".removesuffix(", "): {
                "passes": cost.passes,
                "scores": {target: asdict(score) for target, score in cost.scores.items()},
            }
            for cost in panel.methods
        }
        for name, panel in panels.items()
    }


def style(panel: Panel, cost: MethodCost) -> figures.Style:
    """Returns the style of a method, with another line where it is fine-tuned."""
    known = figures.STYLES[panel.methods[cost.method]]
    if not cost.after:
        return known
    return replace(known, label=f"{known.label}, {cost.after}", line="-.")


def draw(panels: Mapping[str, CostComparison], picture: Path = PICTURE) -> None:
    """Writes the picture."""
    size = (10.0, 3.6 * len(panels) + 0.4)
    figure, grid = figures.new_figure(len(panels), 2, size=size, font_size=10)
    for (left, right), (name, comparison) in zip(grid, panels.items(), strict=True):
        _draw_panel(left, right, PANELS[name], comparison)
    figures.save(figure, picture, described(panels))


def _draw_panel(left: Any, right: Any, panel: Panel, comparison: CostComparison) -> None:  # noqa: ANN401
    """Draws the passes on the left axes and the scores on the right ones."""
    shift = 0.08  # for markers side by side where curves are equal
    for cost in comparison.methods:
        look = {**style(panel, cost).options, "markersize": 6, "linewidth": 1.5}
        look["fillstyle"] = "none" if cost.after else "full"
        equal = [other for other in comparison.methods if other.passes == cost.passes]
        offset = shift * (equal.index(cost) - (len(equal) - 1) / 2)
        x = [count + offset for count in range(1, len(cost.passes) + 1)]
        left.plot(x, cost.passes, label=style(panel, cost).label, **look)
        points = [
            (comparison.targets.index(at) + 1, 100 * score.mean, 100 * (score.std or 0))
            for at, score in cost.scores.items()
        ]
        x, y, deviation = zip(*points, strict=True)
        right.errorbar(x, y, deviation, **look)
    levels = [f"{100 * (summary.sparsity(target) or 0):.4g} %" for target in comparison.targets]
    places = range(1, len(levels) + 1)
    left.set_xticks(places, [f"{n}\n{level}" for n, level in zip(places, levels, strict=True)])
    left.set(xlabel="number of sparsities, and the one that is added", ylim=(0, None))
    left.set_ylabel("passes of all trainings")
    low, high = _limits(comparison)
    right.set_ylim(low, high)
    text = "\n".join(
        f"{style(panel, cost).label}: {', '.join(f'{value:.0f}' for value in _percent(cost))}"
        for cost in comparison.methods
        if max(_percent(cost)) < low
    )
    right.text(0.03, 0.04, text, transform=right.transAxes, fontsize=9)
    right.set_xticks(places, levels)
    right.set(xlabel="sparsity", ylabel=f"test {summary.in_percent(comparison.metric)}")
    left.set_title(panel.title, fontsize=10, loc="left")
    for axis in (left, right):
        figures.add_grid(axis)
    beside = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "fontsize": 9, "frameon": False}
    right.legend(*left.get_legend_handles_labels(), **beside)


def _limits(comparison: CostComparison) -> tuple[float, float]:
    """Returns the ends of the axis: all scores of CrAM+ and of the methods for one target each."""
    inside = [
        value
        for cost in comparison.methods
        if cost.method.startswith(OURS) or cost.per_target
        for value in _percent(cost)
    ]
    high = max(value for cost in comparison.methods for value in _percent(cost))
    return min(inside) - ROOM, high + ROOM


def _percent(cost: MethodCost) -> list[float]:
    return [100 * score.mean for score in cost.scores.values()]


def main(results: Path = RESULTS, picture: Path = PICTURE) -> None:
    """Draws the picture.

    Raises:
        SystemExit: If there are too few results for a comparison; nothing is written then.
    """
    panels = read_panels(results)
    if not panels:
        raise SystemExit(
            f"nothing is drawn: {results} needs CrAM+ and a method that trains for each target, of "
            f"{' or '.join(PANELS)}"
        )
    draw(panels, picture)


if __name__ == "__main__":
    main()
