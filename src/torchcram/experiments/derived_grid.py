"""Settings of fine-tuning tried out, the best of them chosen on what early stopping holds out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.derived_start import ORIGIN, START
from torchcram.experiments.finetuning import Derived, finetune
from torchcram.experiments.io.files import locked, write_atomically
from torchcram.experiments.sweep import Overrides, folder_name, require_same_texts
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.stopping import held_out_values

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.training.trainer import Progress


@dataclass(frozen=True, eq=False)
class Tried:
    """Settings, and what they came to.

    Attributes:
        overrides: such as "optimizer.lr=3e-5".
        folder: of the run.
        held_out: the best metric on what was held out.
        rounds: how many there were, a test after each.
        derived: the fine-tuned model; what it comes to on the test split chooses nothing.
    """

    overrides: Overrides
    folder: Path
    held_out: float
    rounds: int
    derived: Derived


@dataclass(frozen=True, eq=False)
class Grid:
    """All that was tried.

    Attributes:
        tried: the best on what was held out first.
        failed: settings whose loss was not finite, and what was said.
    """

    tried: list[Tried]
    failed: dict[Overrides, str]


def finetune_grid(
    run_folder: Path,
    at: str,
    out: Path,
    *,
    recipes: Mapping[Overrides, Recipe],
    data: AnyData,
    device: torch.device,
    seed: int | None = None,
    make_step: MakeStep = EagerStep,
    progress: Callable[[str], Progress] | None = None,
) -> Grid:
    """Fine-tunes by every recipe, each in a folder of its own; all start from the same weights.

    One whose loss is not finite fails alone.

    Args:
        run_folder: of a finished training.
        at: as `finetune` takes it.
        out: folder for all of it.
        recipes: by what sets them apart; all with early stopping.
        data: to train and test on.
        device: of all that is computed.
        seed: as `finetune` takes it.
        make_step: how steps are taken.
        progress: called with the name of a point for what is told of it.

    Raises:
        ValueError: if recipes do not hold out the same part, if all fail, and as `finetune`.
    """
    require_same_texts(recipes.values())
    stops = [recipe.train.early_stopping for recipe in recipes.values()]
    if None in stops:
        raise ValueError(
            "a grid chooses on what train.early_stopping holds out, and it is null; allowed: "
            "recipes of texts that have it"
        )
    if len({stop.held_out for stop in stops if stop}) > 1:
        raise ValueError(
            "train.early_stopping.held_out is not the same for all points: they are compared on "
            "one part"
        )
    tried: list[Tried] = []
    failed: dict[Overrides, str] = {}
    for overrides, recipe in recipes.items():
        folder = out / folder_name(overrides)
        if tried:
            _share_start(tried[0].folder, folder)
        try:
            derived = finetune(
                run_folder,
                at,
                folder,
                recipe=recipe,
                data=data,
                device=device,
                seed=seed,
                make_step=make_step,
                progress=None if progress is None else progress(" ".join(overrides)),
            )
        except FloatingPointError as error:
            failed[overrides] = str(error)
            continue
        values = held_out_values(folder)
        tried.append(Tried(overrides, folder, max(values), len(values), derived))
    if not tried:
        first = next(iter(failed))
        raise ValueError(f"every training failed; the first, {' '.join(first)}: {failed[first]}")
    return Grid(sorted(tried, key=lambda one: one.held_out, reverse=True), failed)


def _share_start(source: Path, folder: Path) -> None:
    """Spares a pruner its work: a start that was computed anew might differ in the last digits."""
    with locked(folder):
        if not (folder / ORIGIN).exists():
            for name in (START, ORIGIN):  # which counts once the second is there
                write_atomically(folder / name, (source / name).read_bytes())
