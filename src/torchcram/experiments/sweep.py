"""Sweeps over settings, scored after one-shot compression on held-out training data."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram import parse_operator
from torchcram.experiments.io import yaml_text
from torchcram.experiments.metrics import average, goodness
from torchcram.experiments.recipe.overrides import Overrides, folder_name, with_targets
from torchcram.experiments.results_store import load_or_measure
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.trainer import Progress, train

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset

HELD_OUT = 0.1  # fraction of the training split to validate on
VALIDATION = "validation.json"
FIXED = ("name", "title", "data", "text", "compress")  # sections that all points share


@dataclass(frozen=True)
class Point:
    """A choice of settings, and its scores on the held-out part of the training split.

    Attributes:
        overrides: Settings on top of the recipe, such as "cram.rho=0.1".
        folder: Name of the run's folder within the folder of the sweep.
        score: Mean accuracy after compression and batch-norm tuning, of perplexities the geometric
            mean; None if the training failed.
        dense: Accuracy of the dense model; None if the training failed.
        targets: Accuracy after compression and batch-norm tuning, by operator.
        failed: Error message if the training failed.
    """

    overrides: Overrides
    folder: str
    score: float | None
    dense: float | None
    targets: Mapping[str, float]
    failed: str | None = None


def read_grid(texts: Sequence[str]) -> list[Overrides]:
    """Returns all combinations of axes such as "cram.rho=0.01,0.05"; the last changes fastest.

    Values are YAML, so a list is one value: "cram.operators=[global:0.5],[global:0.5, global:0.9]".

    Raises:
        ValueError: If an axis cannot be read, is repeated, or is the same for all points.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, equals, listed = text.partition("=")
        key = key.strip()
        values = yaml_text.parse(f"[{listed}]", f"grid {text!r}") if equals else None
        if not key or not values:
            raise ValueError(f"grid {text!r}: allowed is KEY=VALUE,VALUE such as cram.rho=0.05,0.1")
        if key.split(".")[0] in FIXED:
            raise ValueError(f"grid {text!r}: {key} is the same for all points of a sweep")
        if key in axes:
            raise ValueError(f"grid {text!r}: {key} is given twice")
        axes[key] = [f"{key}={_text(value)}" for value in values]
        if len(set(axes[key])) < len(axes[key]):
            raise ValueError(f"grid {text!r}: a value is given twice")
    return list(itertools.product(*axes.values()))


def sweep(
    recipes: Mapping[Overrides, Recipe],
    out: Path,
    *,
    data: Dataset,
    device: torch.device,
    seed: int,
    score: Sequence[str] = (),
    make_step: MakeStep = EagerStep,
    eval_interval: int = 1,
    progress: Callable[[str], Progress] | None = None,
) -> list[Point]:
    """Trains with every recipe on nine tenths of the training split, and scores on the rest.

    Every point is a run in its own folder; an interrupted sweep continues. A training whose loss
    is not finite fails, and the others go on.

    Args:
        recipes: Recipes by the settings in which they differ.
        out: Folder that the folders of the runs are made in.
        data: Dataset whose training split is divided; its test split is not used.
        device: Device that everything is computed on.
        seed: Seed of every training.
        score: Operators to score on, as text; by default the targets of the recipe.
        make_step: Function that makes the `Step`: eager, or as CUDA graphs.
        eval_interval: Number of epochs between two tests on the held-out part.
        progress: Function that takes the settings of a point and returns its progress function.

    Returns:
        The points, best first; points with equal scores keep their order.

    Raises:
        ValueError: If texts would have to be tokenized for more than one model.
    """
    tasks = [recipe.build_task() for recipe in recipes.values()]
    tasks[0].require_same_data(tasks)
    divided = tasks[0].hold_out(data, HELD_OUT)
    scored = [str(parse_operator(text)) for text in score]
    points = []
    for overrides, recipe in recipes.items():
        name = folder_name(overrides)
        targets = list(dict.fromkeys([*recipe.compress.to, *scored]))
        try:
            trained = train(
                with_targets(recipe, targets),
                out / name,
                data=divided,
                seed=seed,
                device=device,
                make_step=make_step,
                eval_interval=eval_interval,
                progress=None if progress is None else progress(" ".join(overrides)),
            )
        except FloatingPointError as error:
            points.append(Point(overrides, name, None, None, {}, str(error)))
            continue
        result = load_or_measure(out / name, trained, divided, device=device, file=VALIDATION)
        (seed_result,) = result.seeds
        after = {target.operator: target.after for target in seed_result.targets}
        values = [after[operator] for operator in scored or recipe.compress.to]
        value = average(values, recipe.metric)
        points.append(Point(overrides, name, value, seed_result.dense, after))
    return sorted(points, key=lambda point: _rank(point, tasks[0].metric), reverse=True)


def _rank(point: Point, metric: str) -> float:
    """Returns a number that is greater for better points, and least if the training failed."""
    return -math.inf if point.score is None else goodness(point.score, metric)


def _text(value: object) -> str:
    """Writes a value so that an override reads it back."""
    if isinstance(value, str):
        with suppress(ValueError):
            if yaml_text.parse(value, "value") == value:
                return value
    return json.dumps(value)
