"""What a finished training comes to at the targets of its recipe: in its folder, and collected."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.evaluation.compressed_models import one_shot
from torchcram.experiments.evaluation.results import (
    Result,
    SeedResult,
    TargetResult,
    merge_seed,
    read_result,
    write_result,
)
from torchcram.experiments.io.dataclass_io import plain
from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import remove_leftovers, taking_turns
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.training.run_folder import DataInfo

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.trainer import Trained

RESULT = "result.json"


def outcome(
    folder: Path,
    trained: Trained,
    data: Dataset,
    *,
    device: torch.device,
    file: str = RESULT,
    progress: Callable[[TargetResult], None] | None = None,
    ranks: Ranks = SINGLE,
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
        ranks: Processes that share the work; rank 0 writes the files.
    """
    found = ranks.broadcast_from_rank0(lambda: _read(folder / file, trained))
    if found is None:
        found = measure(trained, data, device=device, progress=progress, ranks=ranks)
        if ranks.is_first:
            write_result(found, folder / file)
    return found


def measure(
    trained: Trained,
    data: Dataset,
    *,
    device: torch.device,
    trials: int = 1,
    save_to: Path | None = None,
    progress: Callable[[TargetResult], None] | None = None,
    ranks: Ranks = SINGLE,
) -> Result:
    """Returns what the model comes to at the targets of its recipe.

    Args:
        trained: what to compress.
        data: that it was trained and tested on.
        device: of all that is computed.
        trials: how many calibration sets.
        save_to: Folder for the compressed models.
        progress: told of every target that is measured.
        ranks: Processes that share the work; rank 0 writes the files.

    Raises:
        ValueError: if the model was trained or tested on other data.
    """
    require_same_data(trained, data)
    targets = one_shot(
        trained.model,
        trained.recipe,
        data,
        trained.recipe.compress.to,
        device=device,
        seed=trained.info.seed,
        trials=trials,
        save_to=save_to,
        progress=progress,
        ranks=ranks,
    )
    return as_result(trained, targets)


def require_same_data(trained: Trained, data: Dataset) -> None:
    """Raises ValueError, naming how they differ, unless a model was trained on this dataset."""
    info = trained.info
    if different := explain_differences(plain(info.data), plain(DataInfo.of(data))):
        raise ValueError(f"{info.data.name}: the run is of other data: {'; '.join(different)}")


def as_result(trained: Trained, targets: Sequence[TargetResult]) -> Result:
    """Returns the scores of a trained model at targets as a result with one seed."""
    info, finished = trained.info, trained.finished
    seed = SeedResult(
        seed=info.seed,
        dense=finished.accuracy,
        seconds=finished.seconds,
        targets=tuple(targets),
        machine=info.machine,
        versions=dict(info.versions),
        processes=finished.processes,
        others=finished.others,
    )
    return merge_seed(None, trained.recipe, seed)


def _read(path: Path, trained: Trained) -> Result | None:
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

    Targets that the file has of the same training stay, where they were not measured anew.

    Args:
        folder: of results; made if it is not there.
        recipe: by which the seed was trained.
        seed: what came out.

    Returns:
        The path of the file.

    Raises:
        ValueError: if earlier seeds were trained by another recipe.
    """
    with taking_turns(folder):
        earlier = _earlier(folder, recipe)
        result = merge_seed(earlier, recipe, _with_earlier(earlier, seed))
        remove_leftovers((folder / result.path).parent)
        write_result(result, folder / result.path)
    return folder / result.path


def _with_earlier(earlier: Result | None, seed: SeedResult) -> SeedResult:
    """Returns a seed with further targets that the same training was compressed to before."""
    found = [one for one in (earlier.seeds if earlier else ()) if one.seed == seed.seed]
    if not found or (found[0].dense, found[0].seconds) != (seed.dense, seed.seconds):
        return seed
    measured = {one.operator: one for one in (*found[0].targets, *seed.targets)}
    return replace(seed, targets=tuple(measured.values()))


def _earlier(folder: Path, recipe: Recipe) -> Result | None:
    path = folder / recipe.task_name / recipe.architecture / f"{recipe.method}.json"
    return read_result(path) if path.exists() else None
