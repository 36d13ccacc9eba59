"""Transfer of trained models to other tasks: several sources, sparsities and tasks at once.

`plan_transfers` reads the sources and says which transfers there are; `run_transfer` does one of
them, in a folder of its own that it continues in:

transfer/                    the run, trained on the whole training split
  start.json, ...            the model that it started from; the other files are those of any run
  result.json                its score, and where it came from
  trials/optimizer.lr=0.01/  a run for each learning rate, without its weights once it is finished
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.evaluation.results import (
    Result,
    SeedResult,
    TransferSource,
    write_result,
)
from torchcram.experiments.finetuning import (
    START,
    FineTuned,
    Grid,
    StartKey,
    Trial,
    check_new_head,
    check_operator,
    finetune,
    read_origin,
    require_new_head,
    run_trials,
    start_key,
)
from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import slug
from torchcram.experiments.recipe.overrides import (
    DENSE,
    TRAINED,
    Overrides,
    read_at,
    trained_target,
    trains_sparse,
    transfer_recipe,
)
from torchcram.experiments.results_store import RESULT, as_result, load_or_measure
from torchcram.experiments.training.run_folder import (
    CHECKPOINTS,
    MODEL,
    RUN,
    DataInfo,
    RunInfo,
    identity,
    read_run,
)
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.trainer import load_trained

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.trainer import Progress

TRIALS = "trials"
HELD_OUT = 0.1  # fraction of the training split that learning rates are compared on
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Source:
    """A finished run whose model is transferred.

    Attributes:
        folder: Folder of the run.
        recipe: Recipe that it was trained with.
        info: Contents of its `run.json`.
    """

    folder: Path
    recipe: Recipe
    info: RunInfo

    @property
    def is_sparse(self) -> bool:
        """Whether a method trained it sparse, so that it has one sparsity and no dense form."""
        return trains_sparse(self.recipe)

    @property
    def is_plain(self) -> bool:
        """Whether it was trained by plain steps of the base optimizer."""
        return self.recipe.method is None and self.recipe.cram is None

    def resembles(self, other: Source) -> bool:
        """Returns whether both have the same model, trained on the same data."""
        ours, theirs = self.recipe.model, other.recipe.model
        same_model = (ours.name, ours.args or {}) == (theirs.name, theirs.args or {})
        return same_model and self.info.data == other.info.data


@dataclass(frozen=True, eq=False)
class Transfer:
    """A transfer of one source, at one sparsity, to one task.

    Attributes:
        source: Run whose model is transferred.
        at: Operator that it is compressed by, as text, "dense", or "trained" for the zeros that a
            method trained.
        target: Name of the recipe of the other task.
        given: Name or file of that recipe, as it was given.
        recipe: Recipe of the transfer, without a learning rate that is searched for.
        recipes: Recipes by the learning rate to try, {(): recipe} where there is no search.
        dense: Name of the recipe of the source whose dense model it is compared with.
        folder: Folder of the run.
        seed: Seed of the run.
        name: Name in the progress.
    """

    source: Source
    at: str
    target: str
    given: str
    recipe: Recipe
    recipes: Mapping[Overrides, Recipe]
    dense: str
    folder: Path
    seed: int
    name: str

    @property
    def trainings(self) -> list[str]:
        """Names of its trainings in the progress: with each learning rate, and the last one."""
        searched = self.recipes if len(self.recipes) > 1 else ()
        return [*(self.trial_name(point) for point in searched), self.name]

    def trial_name(self, point: Overrides) -> str:
        """Returns the name of the training with a learning rate in the progress."""
        return f"{self.name}, {' '.join(point)}"

    @property
    def operator(self) -> str:
        """The operator that stands for its sparsity, or "dense"."""
        return trained_target(self.source.recipe) if self.at == TRAINED else self.at


def read_source(folder: Path) -> Source:
    """Reads the folder of a run.

    Raises:
        ValueError: If there is no run, or it is not finished.
    """
    recipe, info = read_run(folder)
    if info.finished is None or not (folder / MODEL).exists():
        raise ValueError(f"{folder}: the training is not finished; train again to continue it")
    return Source(folder, recipe, info)


def plan_transfers(
    sources: Sequence[Source],
    ats: Sequence[str],
    targets: Mapping[str, Recipe],
    *,
    dense: Sequence[Source] = (),
    compared_with: str | None = None,
    lrs: Sequence[float] = (),
    epochs: int | None = None,
    overrides: Sequence[str] = (),
    out: Path | None = None,
    seed: int | None = None,
) -> list[Transfer]:
    """Returns the transfers of every source, at every sparsity, to every task.

    A source that a method trained sparse is transferred with the zeros that it has, and compared
    with a dense source, whose dense transfers are added where they are not among the others.

    Args:
        sources: Runs to transfer.
        ats: Operators as text, or "dense". None of them transfers sparse sources as they are, and
            dense ones dense.
        targets: Recipes of the other tasks, by their names or files as given.
        dense: Runs that sparse sources are compared with, instead of the plain one of `sources`
            with the same model and data.
        compared_with: Name of the recipe of that run, where its transfers are made elsewhere.
        lrs: Learning rates; of several, the best on a held-out part is used.
        epochs: Number of epochs, instead of that of each recipe.
        overrides: Further changes to the recipes.
        out: Folder that the folders of the runs are made in, or that of a single run; by default
            they are made beside each source.
        seed: Seed of all runs, instead of that of their sources.

    Raises:
        ValueError: If a source does not have a sparsity, no dense source fits, or two transfers are
            the same.
    """
    work: dict[tuple[Path, str], tuple[Source, str]] = {}  # with the name of the dense source
    for source in sources:
        other = source
        if source.is_sparse and compared_with is None:
            plain = [each for each in sources if each.is_plain]
            other = _dense_source(source, dense or plain)
            work.setdefault((other.folder, DENSE), (other, other.recipe.name))
        for at in _sparsities(source, ats):
            work[source.folder, at] = (source, compared_with or other.recipe.name)
    alone = len(work) * len(targets) == 1
    items: list[Transfer] = []
    for (_, at), (source, compared) in work.items():
        for given, target in targets.items():
            recipes = {
                point: transfer_recipe(
                    source.recipe, at, target, epochs=epochs, overrides=[*overrides, *point]
                )
                for point in _grid(lrs)
            }
            base = transfer_recipe(source.recipe, at, target, epochs=epochs, overrides=overrides)
            item = Transfer(
                source=source,
                at=at,
                target=target.name,
                given=given,
                recipe=base if len(recipes) > 1 else next(iter(recipes.values())),
                recipes=recipes,
                dense=compared,
                folder=Path(),
                seed=source.info.seed if seed is None else seed,
                name="",
            )
            require_new_head(source.recipe, item.recipe)
            folder = out if out is not None and alone else _folder(item, out)
            items.append(replace(item, folder=folder, name=_name(item, targets.values())))
    _require_different(items)
    return items


def check_transfers(
    items: Sequence[Transfer], load: Callable[[Recipe], Dataset]
) -> dict[str, Dataset]:
    """Checks that every model can be compressed as planned and takes the data of its task.

    Folders that hold other runs are refused, too.

    Args:
        items: Transfers to check; nothing of them is trained.
        load: Function that loads the dataset of a recipe.

    Returns:
        The datasets, by the names of the tasks' recipes.

    Raises:
        ValueError: If a transfer is not possible.
    """
    datasets: dict[str, Dataset] = {}
    for source in {item.source.folder: item.source for item in items}.values():
        trained = load_trained(source.folder, CPU)
        own = [item for item in items if item.source.folder == source.folder]
        for at in dict.fromkeys(item.at for item in own):
            check_operator(trained, at)
        for item in own:
            key = start_key(trained, item.at, new_head=True, seed=item.seed)
            read_origin(item.folder, key)
        for item in {item.target: item for item in own}.values():
            if item.target not in datasets:
                datasets[item.target] = load(item.recipe)
            check_new_head(trained, item.recipe, datasets[item.target])
    return datasets


@dataclass(frozen=True, eq=False)
class Transferred:
    """A finished transfer.

    Attributes:
        transfer: Transfer that was planned.
        finetuned: Trained model, and the model that it started from.
        search: Learning rates that were tried; None where there was no choice.
        result: Contents of `result.json`.
    """

    transfer: Transfer
    finetuned: FineTuned
    search: Grid[Trial] | None
    result: Result

    @property
    def seed_result(self) -> SeedResult:
        """The score of its seed, for a file of results."""
        return self.result.seeds[0]


def run_transfer(
    item: Transfer,
    data: Dataset,
    *,
    device: torch.device,
    make_step: MakeStep = EagerStep,
    eval_interval: int = 1,
    progress: Callable[[str], Progress] | None = None,
) -> Transferred:
    """Does a transfer, or continues where an earlier call stopped.

    Of several learning rates, each is trained on nine tenths of the training split, with the same
    start. The best on the last tenth is trained on the whole training split, and its model is the
    one that is tested.

    Args:
        item: Transfer that `plan_transfers` returned.
        data: Dataset of its task.
        device: Device that everything is computed on.
        make_step: Function that makes the `Step`: eager, or as CUDA graphs.
        eval_interval: Number of epochs between two tests.
        progress: Function that takes the name of a training and returns its progress function.

    Raises:
        ValueError: If a folder holds another run.
        FloatingPointError: If the loss is not finite, with every learning rate if there are
            several.
    """

    def train_in(folder: Path, point: Overrides, data: Dataset, name: str) -> FineTuned:
        return finetune(
            item.source.folder,
            item.at,
            folder,
            recipe=item.recipes[point],
            data=data,
            device=device,
            new_head=True,
            seed=item.seed,
            make_step=make_step,
            eval_interval=eval_interval,
            progress=None if progress is None else progress(name),
        )

    search, chosen = None, next(iter(item.recipes))
    if len(item.recipes) > 1:
        search = _search_lr(item, data, train_in)
        chosen = search.best.overrides
    finetuned = train_in(item.folder, chosen, data, item.name)
    result = _write_result(item, finetuned, data, device=device, chosen=chosen if search else ())
    return Transferred(item, finetuned, search, result)


def _search_lr(
    item: Transfer,
    data: Dataset,
    train_in: Callable[[Path, Overrides, Dataset, str], FineTuned],
) -> Grid[Trial]:
    """Trains with every learning rate on a part of the training split; see `run_transfer`."""
    divided = item.recipe.build_task().hold_out(data, HELD_OUT, item.seed)
    source = load_trained(item.source.folder, CPU)
    key = start_key(source, item.at, new_head=True, seed=item.seed)

    def run_trial(point: Overrides, folder: Path) -> Trial:
        score = _finished_score(folder, item.recipes[point], key, divided)
        if score is None:
            finetuned = train_in(folder, point, divided, item.trial_name(point))
            score = finetuned.trained.finished.accuracy
        return Trial(point, folder, score)

    search = run_trials(item.recipes, item.folder / TRIALS, run_trial)
    for trial in search.trials:  # the scores are in run.json, and no weights are needed any more
        _remove_weights(trial.folder)
    return search


def _finished_score(folder: Path, recipe: Recipe, key: StartKey, data: Dataset) -> float | None:
    """Returns the score of a finished trial, whose weights may be gone; None for any other.

    Raises:
        ValueError: If the folder holds another trial.
    """
    if not (folder / RUN).exists():
        return None
    stored, info = read_run(folder)
    if info.finished is None:
        return None
    read_origin(folder, key)  # refuses another start
    expected = replace(info, seed=key.seed, data=DataInfo.of(data))
    if different := explain_differences(identity(stored, info), identity(recipe, expected)):
        raise ValueError(
            f"{folder} holds another run: {'; '.join(different)}; choose another folder (--out)"
        )
    return info.finished.accuracy


def _remove_weights(folder: Path) -> None:
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
    for name in (MODEL, START):
        (folder / name).unlink(missing_ok=True)


def _write_result(
    item: Transfer, done: FineTuned, data: Dataset, *, device: torch.device, chosen: Overrides
) -> Result:
    """Writes `result.json`; a dense model is compressed to the targets of its recipe, too."""
    if done.origin.holds_masks:
        result = as_result(done.trained, ())
    else:
        result = load_or_measure(item.folder, done.trained, data, device=device)
    source = TransferSource(
        recipe=item.source.recipe.name,
        title=item.source.recipe.title,
        at=item.operator,
        target=item.target,
        dense=item.dense,
        sparsity=done.sparsity,
        model_sparsity=done.model_sparsity,
    )
    seed = replace(result.seeds[0], chosen=chosen, source=source)
    result = replace(result, seeds=(seed,))
    write_result(result, item.folder / RESULT)
    return result


def _grid(lrs: Sequence[float]) -> list[Overrides]:
    return [(f"optimizer.lr={lr!r}",) for lr in lrs] or [()]


def _sparsities(source: Source, ats: Sequence[str]) -> list[str]:
    """Returns what to compress a source by, in canonical form."""
    if not source.is_sparse:
        if TRAINED in ats:
            trained_target(source.recipe)  # refuses it
        return list(dict.fromkeys(map(read_at, ats))) or [DENSE]
    target = trained_target(source.recipe)
    for at in ats:
        if at != TRAINED and read_at(at) != target:
            raise ValueError(
                f"{source.folder} was trained to be sparse, and {at} is not what it was trained "
                f"for; allowed: {target}, or no --at"
            )
    return [TRAINED]


def _dense_source(source: Source, candidates: Sequence[Source]) -> Source:
    """Returns the run whose dense model a sparse source is compared with.

    Raises:
        ValueError: If none or several of the candidates fit.
    """
    fitting = [each for each in candidates if not each.is_sparse and each.resembles(source)]
    seeds = [each for each in fitting if each.info.seed == source.info.seed]
    fitting = seeds or fitting
    if len({each.recipe.name for each in fitting}) != 1:
        folders = ", ".join(str(each.folder) for each in fitting) or "none of the runs"
        raise ValueError(
            f"{source.folder} is sparse and needs a dense run of the same model and data that it "
            f"is compared with; these fit: {folders}; name one by --dense RUN"
        )
    return fitting[0]


def _folder(item: Transfer, out: Path | None) -> Path:
    at, source = slug(item.operator), item.source
    if out is not None:
        name = f"{slug(source.recipe.name)}-seed{source.info.seed}"
        return out / name / f"{at}-{slug(item.target)}"
    run = source.folder if source.folder.name else source.folder.resolve()
    return run.with_name(f"{run.name}-transfer-{at}-{slug(item.target)}")


def _name(item: Transfer, targets: Collection[Recipe]) -> str:
    task = item.recipe.task_name
    if [target.task_name for target in targets].count(task) > 1:
        task = item.target
    return f"{item.source.recipe.method_name} seed {item.seed}, {item.operator}, to {task}"


def _require_different(items: Sequence[Transfer]) -> None:
    """Refuses transfers that would share a folder or a result."""
    seen: dict[object, Transfer] = {}
    for item in items:
        for key in (item.folder.absolute(), (item.recipe.name, item.seed)):
            other = seen.setdefault(key, item)
            if other is not item:
                raise ValueError(
                    f"{item.source.folder} and {other.source.folder} at {item.operator} to "
                    f"{item.target} have the same name, {item.recipe.name} with seed {item.seed}; "
                    "transfer them one by one, or give the recipes different names"
                )
