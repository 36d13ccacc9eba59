"""What a finished training comes to at the targets of its recipe: in its folder, and collected."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.oneshot import one_shot, seed_result
from torchcram.experiments.results import (
    Result,
    SeedResult,
    TargetResult,
    merge_seed,
    read_result,
    write_result,
)

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.data import DataSet, PictureSet
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.train import Trained

RESULT = "result.json"


def outcome(
    folder: Path,
    trained: Trained,
    data: DataSet | PictureSet,
    *,
    device: torch.device,
    file: str = RESULT,
    progress: Callable[[TargetResult], None] | None = None,
) -> Result:
    """Returns what the model comes to at the targets of its recipe, and leaves it in the folder.

    What the folder says already is taken if it is of this training and these targets.

    Args:
        folder: of the run.
        trained: what it came to.
        data: that it was trained and tested on.
        device: of all that is computed.
        file: in the folder.
        progress: told of every target that is measured.
    """
    found = _found(folder / file, trained)
    if found is None:
        targets = one_shot(
            trained.model,
            trained.recipe,
            data,
            trained.recipe.compress.to,
            device=device,
            seed=trained.info.seed,
            progress=progress,
        )
        found = merge_seed(None, trained.recipe, seed_result(trained.info, targets))
        write_result(found, folder / file)
    return found


def _found(path: Path, trained: Trained) -> Result | None:
    try:
        found = read_result(path)
        (seed,) = found.seeds
        titled = merge_seed(found, trained.recipe, seed)  # refuses another recipe
    except (OSError, ValueError):
        return None
    if (seed.seed, seed.dense) != (trained.info.seed, trained.finished.accuracy):
        return None
    if titled != found:
        write_result(titled, path)
    return titled


def check_results(folder: Path, recipe: Recipe, seed: int) -> None:
    """Raises ValueError if `add_to_results` would refuse the recipe, before it is trained."""
    earlier = _earlier(folder, recipe)
    if earlier is not None:
        merge_seed(earlier, recipe, replace(earlier.seeds[0], seed=seed))


def add_to_results(folder: Path, recipe: Recipe, seed: SeedResult) -> Path:
    """Puts a seed into `<task>/<model>/<method>.json`, while no other process does.

    Args:
        folder: of results; made if it is not there.
        recipe: by which the seed was trained.
        seed: what came out.

    Returns:
        The path of the file.

    Raises:
        ValueError: if earlier seeds were trained by another recipe.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with _alone_in(folder):
        result = merge_seed(_earlier(folder, recipe), recipe, seed)
        write_result(result, folder / result.path)
    return folder / result.path


def _earlier(folder: Path, recipe: Recipe) -> Result | None:
    path = folder / recipe.task / recipe.architecture / f"{recipe.method}.json"
    return read_result(path) if path.exists() else None


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process is in such a block; leaves no file behind."""
    try:
        import fcntl
    except ImportError:  # Windows: nobody waits
        yield
        return
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
