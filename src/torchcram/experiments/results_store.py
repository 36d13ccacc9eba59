"""Results of finished trainings: measured, kept in the run folder, and collected over seeds."""

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
from torchcram.experiments.io.files import one_process_at_a_time, remove_leftovers
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.training.run_folder import DataInfo

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.trainer import Trained

RESULT = "result.json"


def load_or_measure(
    folder: Path,
    trained: Trained,
    data: Dataset,
    *,
    device: torch.device,
    file: str = RESULT,
    progress: Callable[[TargetResult], None] | None = None,
    ranks: Ranks = SINGLE,
) -> Result:
    """Returns the scores of a trained model at the targets of its recipe.

    They are read from the folder if it has them for this training and these targets; otherwise
    they are measured and written there.

    Args:
        folder: Folder of the run.
        trained: Finished training.
        data: Dataset that it was trained and tested on.
        device: Device that everything is computed on.
        file: Name of the result file in the folder.
        progress: Function that is called with every target as soon as it is scored.
        ranks: Processes that share the work; rank 0 writes the files.
    """
    result = ranks.broadcast_from_rank0(lambda: _read(folder / file, trained))
    if result is None:
        result = measure(trained, data, device=device, progress=progress, ranks=ranks)
        if ranks.is_first:
            write_result(result, folder / file)
    return result


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
    """Compresses a trained model to the targets of its recipe and returns the scores.

    Args:
        trained: Finished training whose model is compressed; it stays unchanged.
        data: Dataset that it was trained and tested on.
        device: Device that everything is computed on.
        trials: Number of calibration sets.
        save_to: Folder that the compressed models are written to; None does not write them.
        progress: Function that is called with every target as soon as it is scored.
        ranks: Processes that share the work; rank 0 writes the files.

    Raises:
        ValueError: If the model was trained or tested on other data.
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
        raise ValueError(
            f"{info.data.name}: the run was trained on other data: {'; '.join(different)}"
        )


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
        epochs=finished.epochs,
        reached=finished.reached,
    )
    return merge_seed(None, trained.recipe, seed)


def _read(path: Path, trained: Trained) -> Result | None:
    """Returns the result in a file, or None unless it is that of this training and recipe."""
    try:
        stored = read_result(path)
        (seed,) = stored.seeds
        titled = merge_seed(stored, trained.recipe, seed)  # refuses another recipe
    except (OSError, ValueError):
        return None
    if (seed.seed, seed.dense) != (trained.info.seed, trained.finished.accuracy):
        return None
    if titled != stored:
        write_result(titled, path)
    return titled


def check_results(folder: Path, recipe: Recipe, seed: int) -> None:
    """Raises ValueError if `add_to_results` would refuse the recipe, before it is trained."""
    earlier = _earlier(folder, recipe)
    if earlier is not None:
        merge_seed(earlier, recipe, replace(earlier.seeds[0], seed=seed))


def require_same_training(folder: Path, trained: Trained) -> None:
    """Raises ValueError if a folder of results has another training with the same seed.

    Further targets can be added to the results of the same training only.
    """
    earlier, seed = _earlier(folder, trained.recipe), trained.info.seed
    finished = trained.finished
    for other in () if earlier is None else earlier.seeds:
        same = (other.dense, other.seconds) == (finished.accuracy, finished.seconds)
        if other.seed != seed or same:
            continue
        whose = f"another training, {other.seconds:.0f} s instead of {finished.seconds:.0f} s"
        if other.seconds == finished.seconds:  # its dense accuracy is that of the first training
            whose = "fine-tuning, which has a single target"
        raise ValueError(
            f"{folder}: its results of {trained.recipe.name} with seed {seed} are those of "
            f"{whose}, and would be lost; allowed: another folder of results"
        )


def add_to_results(folder: Path, recipe: Recipe, seed: SeedResult) -> Path:
    """Adds a seed to `<task>/<model>/<method>.json`; several processes take turns.

    Targets of the same training that are already in the file stay, unless they were measured again.

    Args:
        folder: Folder of results, which is made if it does not exist.
        recipe: Recipe that the seed was trained with.
        seed: Scores of the seed.

    Returns:
        Path of the file.

    Raises:
        ValueError: If earlier seeds were trained with another recipe.
    """
    with one_process_at_a_time(folder):
        earlier = _earlier(folder, recipe)
        result = merge_seed(earlier, recipe, _with_earlier(earlier, seed))
        remove_leftovers((folder / result.path).parent)
        write_result(result, folder / result.path)
    return folder / result.path


def _with_earlier(earlier: Result | None, seed: SeedResult) -> SeedResult:
    """Returns a seed with the targets of an earlier measurement of the same training added."""
    stored = [other for other in (earlier.seeds if earlier else ()) if other.seed == seed.seed]
    if not stored or (stored[0].dense, stored[0].seconds) != (seed.dense, seed.seconds):
        return seed
    measured = {target.operator: target for target in (*stored[0].targets, *seed.targets)}
    return replace(seed, targets=tuple(measured.values()))


def _earlier(folder: Path, recipe: Recipe) -> Result | None:
    path = folder / recipe.task_name / recipe.architecture / f"{recipe.method_name}.json"
    return read_result(path) if path.exists() else None
