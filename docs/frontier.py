"""Draws docs/frontier.png, accuracy against the cost of a training, and writes its tables.

The points are the files `results/<task>/<model>/<method>.json` and, for other lengths of the same
training, `results/frontier/<task>/<model>/<method>-N-epochs.json`; what is missing is left out:

    torchcram train cifar10-jpeg/resnet20/sgd --epochs 40 --epochs 80 --results results/frontier

The tables stand in docs/results.md between `<!-- frontier:cifar10-jpeg/resnet20 -->` and
`<!-- end frontier -->`. A table without such a section is printed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import figures
from figures import RESULTS

from torchcram.experiments.evaluation.results import Result, read_result
from torchcram.experiments.io.dict_diff import differences
from torchcram.report import summary

PICTURE, PAGE = figures.DOCS / "frontier.png", figures.DOCS / "results.md"
DENSE = "dense"
MAY_DIFFER = {"name", "title", "train.epochs", "schedule.warmup_epochs"}
STYLES = {
    "plain": figures.STYLES["sgd"],
    "CrAM+, 2.0x": figures.STYLES["cram-plus-multi"],
    "CrAM+, 1.5x": figures.STYLES["cram-plus-multi-1.5x"],
    "CrAM+, 1.0x": figures.STYLES["cram-plus-multi-1x"],
}
FAR = 5.0  # points; where plain training is further below, its curve would flatten the others


@dataclass(frozen=True)
class Panel:
    """A row of the picture.

    Attributes:
        title: Model and dataset in words.
        methods: Methods by the forms in `STYLES`; those of a form differ in their length alone.
        targets: Targets, each with axes of its own after those of the dense models.
    """

    title: str
    methods: dict[str, tuple[str, ...]]
    targets: tuple[str, ...]


PANELS = {
    "cifar10-jpeg/resnet20": Panel(
        "ResNet20 on CIFAR-10 (as JPEG)",
        {
            "plain": ("sgd", "sgd-2x"),
            "CrAM+, 2.0x": ("cram-plus-multi",),
            "CrAM+, 1.5x": ("cram-plus-multi-1.5x",),
            "CrAM+, 1.0x": ("cram-plus-multi-1x",),
        },
        tuple(f"global:{level}" for level in (0.5, 0.7, 0.8, 0.9, 0.95)),
    ),
    "squad/minilm-l6": Panel(
        "6-layer encoder on SQuAD",
        {
            "plain": ("adam-long",),
            "CrAM+, 2.0x": ("cram-plus-multi-long",),
            "CrAM+, 1.5x": ("cram-plus-multi-long-1.5x",),
            "CrAM+, 1.0x": ("cram-plus-multi-long-1x",),
        },
        tuple(f"uniform:{level}" for level in (0.5, 0.6, 0.7, 0.8)),
    ),
}

Point = tuple[float, float, float]
"""Passes, mean accuracy and its deviation over the seeds, the latter two in percent."""
Curves = dict[str, dict[str, list[Point]]]
"""Points by target, the dense models first, and by form."""


def read_form(panel: str, form: str, results: Path = RESULTS) -> list[Result]:
    """Returns the results of a form in the order of their passes.

    Of two results with the same passes, the one with more seeds counts.

    Raises:
        ValueError: If two of them differ in more than the length of the training.
    """
    known: dict[float, Result] = {}
    first: Result | None = None
    for method in PANELS[panel].methods[form]:
        paths = [results / panel / f"{method}.json"]
        lengths = (results / "frontier" / panel).glob(f"{method}-*-epochs.json")
        named = re.compile(re.escape(method) + r"-[0-9]+-epochs\.json")
        paths += sorted(path for path in lengths if named.fullmatch(path.name))
        for path in paths:
            if not path.exists():
                continue
            result = read_result(path)
            first = first or result
            keys = set(differences(first.recipe, result.recipe)) - MAY_DIFFER
            if keys:
                raise ValueError(
                    f"{path} was trained with other settings than {first.method}; they differ in "
                    f"{', '.join(sorted(keys))}"
                )
            cost = summary.cost([result])
            if cost is None:
                raise ValueError(f"{path} does not say its epochs")
            earlier = known.get(cost.passes)
            if earlier is None or len(earlier.seeds) < len(result.seeds):
                known[cost.passes] = result
    return [known[passes] for passes in sorted(known)]


def read_curves(results: Path = RESULTS) -> dict[str, Curves]:
    """Returns the points of every panel that has results."""
    return {
        panel: curves
        for panel in PANELS
        if any((curves := _curves(panel, results))[DENSE].values())
    }


def several_lengths(results: Path = RESULTS) -> dict[str, Curves]:
    """Returns the panels in which a form was trained for several lengths; the others say little."""
    return {
        panel: curves
        for panel, curves in read_curves(results).items()
        if any(len(points) > 1 for points in curves[DENSE].values())
    }


def _curves(panel: str, results: Path) -> Curves:
    forms = {form: read_form(panel, form, results) for form in STYLES}
    return {
        target: {form: _points(members, target) for form, members in forms.items() if members}
        for target in (DENSE, *PANELS[panel].targets)
    }


def _points(results: list[Result], target: str) -> list[Point]:
    points = []
    for result in results:
        rows = summary.summaries(result)
        if target != DENSE and target not in rows:
            continue
        score = summary.dense(result) if target == DENSE else rows[target].after
        cost = summary.cost([result])
        assert cost is not None  # noqa: S101  `read_form` refuses it
        deviation = figures.seed_deviation(result, score)
        points.append((cost.passes, *(round(100 * x, 2) for x in (score.mean, deviation))))
    return points


def table(panel: str, results: Path = RESULTS) -> str:
    """Returns the table of a panel in Markdown, in the order of the passes."""
    targets = PANELS[panel].targets
    members = [result for form in STYLES for result in read_form(panel, form, results)]
    shown = sorted(members, key=lambda result: getattr(summary.cost([result]), "passes", 0.0))
    header = ["method", "epochs", "passes", DENSE, *(f"`{target}`" for target in targets), "seeds"]
    rows = []
    for result in shown:
        scores = summary.summaries(result)
        after = [str(scores[target].after) if target in scores else "" for target in targets]
        title = re.sub(r", ([0-9]+|twice the) epochs?$", "", result.title)
        length = [summary.epochs(result), summary.passes(result)]
        rows.append([title, *length, str(summary.dense(result)), *after, str(len(result.seeds))])
    metrics = " and ".join(dict.fromkeys(result.metric for result in shown))
    data = ", ".join(dict.fromkeys(result.data for result in shown))
    note = (
        f"Test {metrics} in % on {data}, mean ± standard deviation where there are several seeds. "
        f"{summary.PASSES.capitalize()}."
    )
    return f"{figures.markdown_table(header, rows)}\n\n{note}"


def update(text: str, results: Path = RESULTS) -> tuple[str, list[str]]:
    """Puts the tables into their sections of a page.

    Returns:
        The text of the page, and the panels with several lengths that have no section there.
    """
    missing = []
    for panel in several_lengths(results):
        text, known = figures.update_section(text, "frontier", panel, table(panel, results))
        missing += [] if known else [panel]
    return text, missing


def draw(results: Path = RESULTS, picture: Path = PICTURE) -> None:
    """Writes the picture; the PNG file carries its numbers as its description.

    Raises:
        ValueError: If there are no such results.
    """
    curves = several_lengths(results)
    if not curves:
        raise ValueError(f"{results} has no results of several lengths of {', '.join(PANELS)}")
    columns = max(len(targets) for targets in curves.values())
    size = (2.3 * columns, 2.6 * len(curves) + 0.5)
    figure, grid = figures.new_figure(len(curves), columns, size=size, font_size=10)
    for axes, (panel, targets) in zip(grid, curves.items(), strict=True):
        for axis in axes[len(targets) :]:
            axis.set_axis_off()
        for axis, (target, forms) in zip(axes, targets.items(), strict=False):
            _draw_target(axis, forms)
            axis.set_title(target, fontsize=10)
            axis.set_xlabel("passes")
        axes[0].set_ylabel(f"{PANELS[panel].title}\n%", fontsize=9)
    figures.add_legend(figure, grid.flat, loc="outside upper center", ncols=4)
    figures.save(figure, picture, curves)


def _draw_target(axis: Any, forms: dict[str, list[Point]]) -> None:  # noqa: ANN401
    """Draws the forms at one target; plain training that is far below is named at the bottom."""
    ours = [y for form, points in forms.items() if form != "plain" for _, y, _ in points]
    for form, points in forms.items():
        if not points:
            continue
        x, y, deviation = zip(*points, strict=True)
        style = {**STYLES[form].options, "label": form}
        if form == "plain" and ours and max(y) < min(ours) - FAR:
            axis.errorbar([], [], **style)  # for the legend
            text = f"plain: {min(y):.0f} to {max(y):.0f}"
            axis.text(0.5, 0.02, text, transform=axis.transAxes, ha="center", color=style["color"])
            continue
        axis.errorbar(x, y, deviation, markersize=5, linewidth=1.5, **style)
    if ours:
        shown = [y for points in forms.values() for _, y, _ in points if y >= min(ours) - FAR]
        room = max(0.5, 0.15 * (max(shown) - min(shown)))
        axis.set_ylim(min(shown) - 1.6 * room, max(shown) + room)
    axis.set_xscale("log")
    axis.set_xticks(sorted({round(x) for points in forms.values() for x, _, _ in points}))
    axis.xaxis.set_major_formatter("{x:g}")
    axis.minorticks_off()
    axis.tick_params(labelsize=8)
    figures.add_grid(axis)


def main() -> None:
    """Draws the picture, updates the page and prints tables that have no section there."""
    draw()
    text, missing = update(PAGE.read_text("utf-8"))
    PAGE.write_text(text, "utf-8")
    for panel in missing:
        print(figures.section("frontier", panel, table(panel)), end="\n\n")  # noqa: T201


if __name__ == "__main__":
    main()
