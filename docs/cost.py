"""Draws docs/cost.png, what it costs to serve several sparsities, and writes its tables.

One training of CrAM+ serves all sparsities; most other methods need one training for each. The left
axes of a row show the passes of all trainings that the first 1, 2, ... sparsities need, the right
ones the accuracy at each sparsity. The numbers come from the files
`results/<task>/<model>/<method>.json`; what is missing there is left out, also sparsities that no
method was trained for:

    torchcram train cifar10-jpeg/resnet20/dpf-k50 cifar10-jpeg/resnet20/dpf-k70 --results results

The picture and the tables stand in docs/baselines.md, between `<!-- cost:tables -->` and
`<!-- end cost -->`. Without such a section they are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, chain, takewhile
from pathlib import Path
from typing import Any

import figures
from figures import RESULTS

from torchcram.experiments.evaluation.results import Result, read_result
from torchcram.experiments.io.files import slug
from torchcram.experiments.recipe.overrides import FINETUNE
from torchcram.report import summary

PICTURE, PAGE = figures.DOCS / "cost.png", figures.DOCS / "baselines.md"
SECTION = ("cost", "tables")
OURS = "cram-plus"  # methods whose names begin so are CrAM+
TUNED = FINETUNE.rstrip("-")  # names of methods end so where models are fine-tuned for each target
ROOM = 0.5  # points beyond the scores of CrAM+ and of the methods for one target each


@dataclass(frozen=True)
class Panel:
    """A row of the picture.

    Attributes:
        title: Model and dataset in words.
        metric: Name of the test score.
        targets: Targets, in the order in which they are served.
        for_all: Recipes of which one training serves all targets, by their styles.
        per_target: Methods with one training for each target, which are the names of their styles.
            The models of both may also be fine-tuned for each target.
    """

    title: str
    metric: str
    targets: tuple[str, ...]
    for_all: Mapping[str, str]
    per_target: tuple[str, ...]

    @property
    def levels(self) -> list[str]:
        """Sparsities of the targets in percent."""
        return [f"{100 * (summary.sparsity(target) or 0):.4g}" for target in self.targets]

    def with_results(self, folder: Path) -> Panel:
        """Returns the panel with the targets only that at least half of the methods have.

        Args:
            folder: Folder of the results of the panel.
        """
        levels = dict(zip(self.targets, self.levels, strict=True))
        trained = [
            {at for at in levels if (folder / f"{method}-k{levels[at]}.json").exists()}
            for method in self.per_target
        ]
        known = [targets for targets in trained if targets]
        common = [at for at in levels if 2 * sum(at in each for each in known) >= len(known)]
        return replace(self, targets=tuple(common))

    def showing(self, curves: Mapping[str, Curve]) -> Panel:
        """Returns the panel with the targets only that curves have a score at."""
        shown = {target for curve in curves.values() for target in curve.scores}
        return replace(self, targets=tuple(at for at in self.targets if at in shown))

    def trainings(self) -> Iterator[tuple[str, str | None, list[tuple[str, ...]]]]:
        """Yields methods with the training for all targets and the further ones for each of them.

        Of the trainings for a target, the last one gives the score.
        """
        for method, recipe in self.for_all.items():
            yield method, recipe, []
            yield method + TUNED, recipe, [(tuned(recipe, at),) for at in self.targets]
        for method in self.per_target:
            each = [f"{method}-k{level}" for level in self.levels]
            yield method, None, [(recipe,) for recipe in each]
            pairs = zip(each, self.targets, strict=True)
            yield method + TUNED, None, [(recipe, tuned(recipe, at)) for recipe, at in pairs]


def tuned(recipe: str, at: str) -> str:
    """Returns the name of the result of fine-tuning at a target."""
    return recipe + FINETUNE + slug(at)


PANELS = {
    "cifar10-jpeg/resnet20": Panel(
        "ResNet20 on CIFAR-10 (as JPEG)",
        "accuracy",
        targets=tuple(f"global:{level}" for level in (0.5, 0.7, 0.8, 0.9, 0.95)),
        for_all={
            "cram-plus-multi": "cram-plus-multi",
            "cram-plus-multi-1x": "cram-plus-multi-1x",
            "sgd": "sgd",
            "sfw": "sfw",
        },
        per_target=("gradual-magnitude", "dpf", "acdc", "str"),
    ),
    "squad/minilm-l6": Panel(
        "6-layer encoder on SQuAD",
        "F1",
        targets=tuple(f"uniform:{level}" for level in (0.5, 0.6, 0.7, 0.8)),
        for_all={
            "cram-plus-multi": "cram-plus-multi-long",
            "cram-plus-multi-1x": "cram-plus-multi-long-1x",
            "adam": "adam-long",
        },
        per_target=(
            "gradual-magnitude",
            "movement",
            "soft-movement",
            "platon",
            "l0",
            "gradual-obs",
        ),
    ),
}


@dataclass(frozen=True)
class Curve:
    """A method in a row of the picture.

    Attributes:
        passes: Passes of all trainings for the first 1, 2, ... targets, up to the first target
            without a result.
        at_most: Whether early stopping may have ended a training earlier, which older files do not
            say.
        scores: Mean score and its deviation over the seeds, both in percent, by target.
        seeds: Numbers of seeds that the scores are means of.
    """

    passes: list[float]
    at_most: bool
    scores: dict[str, tuple[float, float]]
    seeds: list[int]


Curves = dict[str, dict[str, Curve]]
"""Curves by panel and method."""


def read_curves(results: Path = RESULTS) -> Curves:
    """Returns all that the picture shows; the PNG file carries it as its description.

    A panel is left out unless it has CrAM+ and a method that trains for each target.
    """
    panels = {panel: _read_panel(panel, results) for panel in PANELS}
    return {panel: curves for panel, curves in panels.items() if not _needed(panel, curves)}


def missing(results: Path = RESULTS) -> list[str]:
    """Returns a line for every kind of result without which a panel is left out."""
    return [
        f"{results / panel} has no {what}; it needs one of {', '.join(files)}"
        for panel in PANELS
        for what, files in _needed(panel, _read_panel(panel, results)).items()
    ]


def _needed(panel: str, curves: Mapping[str, Curve]) -> dict[str, list[str]]:
    """Returns the files of which one is missing in a panel, by what they are results of."""
    first: dict[str, dict[str, str]] = {"CrAM+": {}, "other method that trains for each target": {}}
    ours, others = first.values()
    shown = PANELS[panel].showing(curves) if curves else PANELS[panel]
    for method, shared, each in shown.trainings():
        if method.startswith(OURS) and shared and not each:
            ours[method] = f"{shared}.json"
        elif each and not method.startswith(OURS):
            others[method] = f"{each[0][-1]}.json"
    known = {method for method, curve in curves.items() if curve.passes}
    return {what: list(files.values()) for what, files in first.items() if not known & files.keys()}


def _read_panel(panel: str, results: Path) -> dict[str, Curve]:
    """Returns the curves of a panel, of methods with a result at one target or more."""
    curves = {}
    served = PANELS[panel].with_results(results / panel)
    for method, shared, each in served.trainings():
        known = {
            name: read_result(path)
            for name in [*([shared] if shared else []), *chain.from_iterable(each)]
            if (path := results / panel / f"{name}.json").exists()
        }
        if shared is None or shared in known:
            curve = _curve(served.targets, known, shared, each)
            if curve.scores:
                curves[method] = curve
    return curves


def _curve(
    targets: tuple[str, ...],
    known: Mapping[str, Result],
    shared: str | None,
    each: list[tuple[str, ...]],
) -> Curve:
    """Returns the curve of a method from its results by name."""
    start = 0.0 if shared is None else _cost(known[shared]).passes
    own = [known[names[-1]] if known.keys() >= set(names) else None for names in each]
    own = own or [known[shared or ""]] * len(targets)
    scores = {
        target: score
        for target, result in zip(targets, own, strict=True)
        if result is not None and (score := _score(result, target)) is not None
    }
    served = list(takewhile(scores.__contains__, targets))
    further = [[_cost(known[name]) for name in names] for names in each[: len(served)]]
    passes = [sum(cost.passes for cost in costs) for costs in further] or [0.0] * len(served)
    return Curve(
        passes=[summary.rounded(start + total) for total in accumulate(passes)],
        at_most=any(cost.at_most for costs in further for cost in costs),
        scores=scores,
        seeds=sorted({len(result.seeds) for result in own if result is not None}),
    )


def _cost(result: Result) -> summary.Cost:
    cost = summary.cost([result])
    if cost is None:
        raise ValueError(f"the result of {result.path} does not say its epochs")
    return cost


def _score(result: Result, target: str) -> tuple[float, float] | None:
    """Returns the score at a target: as trained where it was trained for it, as in all tables."""
    rows = summary.summaries(result)
    trained = summary.trained_for(result)
    # a method may need another pattern of the same sparsity
    if trained is not None and summary.sparsity(trained) == summary.sparsity(target):
        score = summary.trained_score(result)
    elif target in rows:
        score = rows[target].after
    else:
        return None
    deviation = figures.seed_deviation(result, score)
    return round(100 * score.mean, 2), round(100 * deviation, 2)


def style(method: str) -> figures.Style:
    """Returns the style of a method, with another line where it is fine-tuned."""
    known = figures.STYLES[method.removesuffix(TUNED)]
    if not method.endswith(TUNED):
        return known
    return replace(known, label=f"{known.label}, fine-tuned", line="-.")


def table(panel: str, curves: Mapping[str, Curve]) -> str:
    """Returns the table of a panel in Markdown."""
    targets = PANELS[panel].showing(curves).targets
    counts = [f"for {count}" for count in range(1, len(targets) + 1)]
    header = ["method", *counts, *(f"`{target}`" for target in targets), "seeds"]
    rows = []
    for method, curve in curves.items():
        passes = ["≤ " * curve.at_most + summary.number(value) for value in curve.passes]
        passes += [""] * (len(targets) - len(passes))
        scores = [_score_text(curve.scores.get(target)) for target in targets]
        seeds = " to ".join(dict.fromkeys(str(n) for n in (curve.seeds[0], curve.seeds[-1])))
        rows.append([style(method).label, *passes, *scores, seeds])
    return figures.markdown_table(header, rows)


def _score_text(score: tuple[float, float] | None) -> str:
    if score is None:
        return ""
    mean, deviation = score
    return f"{mean:.2f}" + (f" ± {deviation:.2f}" if deviation else "")


def content(curves: Curves) -> str:
    """Returns what the section of the page holds: the picture and the tables."""
    parts = [f"![Passes for several sparsities, and the accuracy at each]({PICTURE.name})"]
    parts += [f"{PANELS[panel].title}:\n\n{table(panel, known)}" for panel, known in curves.items()]
    parts.append(
        "“For 3” is the number of passes that the first three sparsities need together, each "
        "forward and backward over the training set. The columns after these are test accuracy or "
        "F1 in % at each sparsity, after batch-norm tuning where there is batch norm, mean ± "
        "standard deviation where there are several seeds."
    )
    return "\n\n".join(parts)


def draw(curves: Curves, picture: Path = PICTURE) -> None:
    """Writes the picture."""
    size = (10.0, 3.6 * len(curves) + 0.4)
    figure, grid = figures.new_figure(len(curves), 2, size=size, font_size=10)
    for (left, right), (panel, known) in zip(grid, curves.items(), strict=True):
        _draw_panel(left, right, PANELS[panel].showing(known), known)
    plain = {
        panel: {method: asdict(curve) for method, curve in known.items()}
        for panel, known in curves.items()
    }
    figures.save(figure, picture, plain)


def _draw_panel(left: Any, right: Any, panel: Panel, curves: Mapping[str, Curve]) -> None:  # noqa: ANN401
    """Draws the passes on the left axes and the scores on the right ones."""
    shift = 0.08  # for markers side by side where curves are equal
    for method, curve in curves.items():
        look = {**style(method).options, "markersize": 6, "linewidth": 1.5}
        look["fillstyle"] = "none" if method.endswith(TUNED) else "full"
        equal = [name for name, other in curves.items() if other.passes == curve.passes]
        offset = shift * (equal.index(method) - (len(equal) - 1) / 2)
        x = [count + offset for count in range(1, len(curve.passes) + 1)]
        left.plot(x, curve.passes, label=style(method).label, **look)
        points = [(panel.targets.index(at) + 1, *score) for at, score in curve.scores.items()]
        x, y, deviation = zip(*points, strict=True)
        right.errorbar(x, y, deviation, **look)
    places = range(1, len(panel.targets) + 1)
    left.set_xticks(
        places, [f"{n}\n{level} %" for n, level in zip(places, panel.levels, strict=True)]
    )
    left.set(xlabel="number of sparsities, and the one that is added", ylim=(0, None))
    left.set_ylabel("passes of all trainings")
    shown = [name for name in curves if name.startswith((OURS, *panel.per_target))]
    low = min(y for name in shown for y, _ in curves[name].scores.values()) - ROOM
    high = max(y for curve in curves.values() for y, _ in curve.scores.values()) + ROOM
    right.set_ylim(low, high)
    below = {
        style(name).label: [f"{y:.0f}" for y, _ in curve.scores.values()]
        for name, curve in curves.items()
        if all(y < low for y, _ in curve.scores.values())
    }
    text = "\n".join(f"{label}: {', '.join(values)}" for label, values in below.items())
    right.text(0.03, 0.04, text, transform=right.transAxes, fontsize=9)
    right.set_xticks(places, [f"{level} %" for level in panel.levels])
    right.set(xlabel="sparsity", ylabel=f"test {panel.metric}, %")
    left.set_title(panel.title, fontsize=10, loc="left")
    for axis in (left, right):
        figures.add_grid(axis)
    beside = {"loc": "center left", "bbox_to_anchor": (1.02, 0.5), "fontsize": 9, "frameon": False}
    right.legend(*left.get_legend_handles_labels(), **beside)


def main(results: Path = RESULTS, picture: Path = PICTURE, page: Path = PAGE) -> None:
    """Draws the picture and updates the page, or says which results are missing.

    Raises:
        SystemExit: If there are too few results for a comparison; nothing is written then.
    """
    curves = read_curves(results)
    lines = "".join(f"\n  {line}" for line in missing(results))
    if not curves:
        raise SystemExit(f"nothing is drawn: there is nothing to compare CrAM+ with{lines}")
    if lines:
        print(f"left out:{lines}", file=sys.stderr)  # noqa: T201
    draw(curves, picture)
    text, known = figures.update_section(page.read_text("utf-8"), *SECTION, content(curves))
    page.write_text(text, "utf-8")
    if not known:
        print(figures.section(*SECTION, content(curves)))  # noqa: T201


if __name__ == "__main__":
    main()
