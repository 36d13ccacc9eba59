"""Settings tried out on a part of the training set, scored after one-shot compression."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram import parse_operator
from torchcram.experiments.evaluation.results import mean
from torchcram.experiments.io import yaml_text
from torchcram.experiments.recipe.overrides import Overrides, folder_name, with_targets
from torchcram.experiments.results_store import outcome
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.trainer import Progress, train

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset

HELD_OUT = 0.1  # of the training set, to validate on
VALIDATION = "validation.json"
FIXED = ("name", "title", "data", "text", "compress")  # what all points have in common


@dataclass(frozen=True)
class Point:
    """Settings, and what they came to on the images held out.

    Attributes:
        overrides: such as "cram.rho=0.1".
        folder: of the run, as named below that of the sweep.
        score: mean accuracy after compression and batch-norm tuning; None if the training failed.
        dense: accuracy of the model as trained.
        targets: accuracy after compression and batch-norm tuning, by operator.
        failed: why, if it did.
    """

    overrides: Overrides
    folder: str
    score: float | None
    dense: float | None
    targets: Mapping[str, float]
    failed: str | None = None


def read_grid(texts: Sequence[str]) -> list[Overrides]:
    """Returns all combinations of "cram.rho=0.01,0.05" and others, the last one changing fastest.

    Values are YAML, so a list is one value: "cram.operators=[global:0.5],[global:0.5, global:0.9]".

    Raises:
        ValueError: naming what cannot be read, is given twice, or cannot differ.
    """
    axes: dict[str, list[str]] = {}
    for text in texts:
        key, equals, given = text.partition("=")
        key = key.strip()
        values = yaml_text.parse(f"[{given}]", f"grid {text!r}") if equals else None
        if not key or not values:
            raise ValueError(f"grid {text!r}: allowed is KEY=VALUE,VALUE such as cram.rho=0.05,0.1")
        if key.split(".")[0] in FIXED:
            raise ValueError(f"grid {text!r}: {key} is the same for all points of a sweep")
        if key in axes:
            raise ValueError(f"grid {text!r}: {key} is there already")
        axes[key] = [f"{key}={_text(value)}" for value in values]
        if len(set(axes[key])) < len(axes[key]):
            raise ValueError(f"grid {text!r}: a value is there twice")
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
    progress: Callable[[str], Progress] | None = None,
) -> list[Point]:
    """Trains by every recipe on nine tenths of the training set, and scores on the last.

    Every point is a run in its own folder; an interrupted sweep continues. One whose loss is not
    finite fails alone.

    Args:
        recipes: by what sets them apart.
        out: folder for all of it.
        data: whose training set is divided; its test set is not looked at.
        device: of all that is computed.
        seed: of every training.
        score: operators to score on, as text; by default the targets of the recipe.
        make_step: how steps are taken.
        progress: called with the name of a point for what is told of its epochs.

    Returns:
        The points, best first; where scores are equal, in the order they were given.

    Raises:
        ValueError: if texts would have to be tokenised for more than one model.
    """
    tasks = [recipe.build_task() for recipe in recipes.values()]
    tasks[0].require_same_data(tasks)
    held = tasks[0].hold_out(data, HELD_OUT)
    wanted = [str(parse_operator(text)) for text in score]
    points = []
    for overrides, recipe in recipes.items():
        name = folder_name(overrides)
        targets = list(dict.fromkeys([*recipe.compress.to, *wanted]))
        try:
            trained = train(
                with_targets(recipe, targets),
                out / name,
                data=held,
                seed=seed,
                device=device,
                make_step=make_step,
                progress=None if progress is None else progress(" ".join(overrides)),
            )
        except FloatingPointError as error:
            points.append(Point(overrides, name, None, None, {}, str(error)))
            continue
        found = outcome(out / name, trained, held, device=device, file=VALIDATION).seeds[0]
        after = {target.operator: target.after for target in found.targets}
        value = mean([after[operator] for operator in wanted or recipe.compress.to])
        points.append(Point(overrides, name, value, found.dense, after))
    return sorted(points, key=lambda one: -1.0 if one.score is None else one.score, reverse=True)


def _text(value: object) -> str:
    """Writes a value so that an override reads it back."""
    if isinstance(value, str):
        with suppress(ValueError):
            if yaml_text.parse(value, "value") == value:
                return value
    return json.dumps(value)
