"""Fine-tuning of a compressed model with its masks held, and transfer to another dataset."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import torch

from torchcram import compress_, masks_of, sparsity
from torchcram.experiments.evaluation.compressed_models import (
    compressed_models,
    looks_at_data,
    score_on_test,
    tune_,
)
from torchcram.experiments.evaluation.results import SeedResult, TargetResult
from torchcram.experiments.io import json_text
from torchcram.experiments.io.dataclass_io import plain
from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import locked, write_atomically
from torchcram.experiments.io.weights import digest, load_model_, save_model
from torchcram.experiments.metrics import best_index, goodness
from torchcram.experiments.models import replace_head_
from torchcram.experiments.recipe.build import (
    build_initial_model,
    cram_weights,
    target_weights,
    to_device,
)
from torchcram.experiments.recipe.overrides import (
    DENSE,
    TRAINED,
    Overrides,
    folder_name,
    read_at,
    trained_target,
)
from torchcram.experiments.seeds import global_seed
from torchcram.experiments.training.run_folder import RUN, DataInfo
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.stop_policy import held_out_values
from torchcram.experiments.training.trainer import (
    Progress,
    Start,
    Trained,
    load_trained,
    train,
)
from torchcram.pruners import Pruner, parse_pruner

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchcram import Operator
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset, Score
    from torchcram.experiments.training.trainer import Progress, Trained


START, ORIGIN = "start.safetensors", "start.json"


@dataclass(frozen=True)
class StartKey:
    """Settings that determine the model which a fine-tuning starts from.

    Attributes:
        at: Operator that the model is compressed by, as text, or "dense"; "trained" for a sparse
            model whose zeros are kept as a method trained them.
        new_head: Whether the last layer is replaced.
        weights: Digest of the model before compression.
        seed: Seed of the new head and of the calibration.
    """

    at: str
    new_head: bool
    weights: str
    seed: int


@dataclass(frozen=True)
class Origin(StartKey):
    """Model that a fine-tuning starts from, as `start.json` describes it.

    Attributes:
        run: Folder of the run that trained the model.
        dense: Test accuracy of that run, from 0 to 1.
        compressed: Names of the weights that were compressed, without those of a new head.
        sparsity: Fraction of zeros in these weights.
        model_sparsity: Fraction of zeros in all parameters.
        before: Test accuracy after compression, from 0 to 1; None with a new head.
        after: Test accuracy after compression and batch-norm tuning; None with a new head.
    """

    run: str
    dense: float
    compressed: tuple[str, ...]
    sparsity: float
    model_sparsity: float
    before: float | None
    after: float | None

    @property
    def holds_masks(self) -> bool:
        """Whether the zeros of the start are held during training."""
        return self.at != DENSE


def start_key(source: Trained, at: str, *, new_head: bool, seed: int) -> StartKey:
    """Returns the settings of the start that `finetune` makes of a trained model.

    Args:
        source: Training whose model is compressed.
        at: Operator as `finetune` takes it.
        new_head: Whether the last layer is replaced.
        seed: Seed of the new run.

    Raises:
        ValueError: If the operator cannot be read, or the model has no zeros of a method to keep.
    """
    if new_head and at == TRAINED:
        trained_target(source.recipe)  # refuses a dense model
    else:
        at = read_at(at)
    return StartKey(at, new_head, digest(source.model.state_dict()), seed)


def read_origin(folder: Path, key: StartKey | None = None) -> Origin | None:
    """Returns the origin of the run in a folder, or None if there is no run yet.

    Args:
        folder: Folder of the run, which need not exist.
        key: Settings that the start must have; None accepts any.

    Raises:
        ValueError: If the folder holds another run; the message names the differences.
    """
    path = folder / ORIGIN
    if not path.exists():
        if (folder / RUN).exists():
            raise ValueError(f"{folder} holds another run, which did not start from a finished one")
        return None
    origin = json_text.parse(Origin, path.read_bytes(), str(path))
    expected = {} if key is None else asdict(key)
    stored = {name: getattr(origin, name) for name in expected}
    if different := explain_differences(stored, expected):
        raise ValueError(
            f"{folder} holds another run: {'; '.join(different)}; choose another folder (--out)"
        )
    return origin


def write_start(
    folder: Path,
    source: Trained,
    *,
    run: Path,
    key: StartKey,
    recipe: Recipe,
    data: Dataset,
    device: torch.device,
) -> Origin:
    """Compresses a trained model, tunes its batch norm, scores it and writes it.

    Args:
        folder: Folder of the new run. The start is complete once `start.json` exists.
        source: Training whose model is compressed, by its own recipe.
        run: Folder of that training.
        key: Settings of the start.
        recipe: Recipe for training on.
        data: Dataset to calibrate and test on.
        device: Device that everything is computed on.

    Raises:
        ValueError: If training would undo what the operator does, if the data is not what the model
            was trained on where a pruner needs that, or if the model does not take the data.
    """
    model = to_device(copy.deepcopy(source.model), device)
    weights_of = cram_weights if key.at == TRAINED else target_weights
    task, names = recipe.build_task(), list(weights_of(source.recipe, model))
    before: float | None = None
    after: float | None = None
    if key.new_head:
        small = _compress(source, model, key, recipe=recipe, data=data, device=device).model
        fresh = _replace_head_(small.cpu(), len(data.classes), key.seed)
        names = [name for name in names if name not in fresh]
        small = to_device(small, device)
        task.check_model(small, data, device=device)
        if key.at != DENSE:
            tune_(small, recipe, data, device=device, seed=key.seed)
    else:
        task.check_model(model, data, device=device)
        start = _compress(source, model, key, recipe=recipe, data=data, device=device)
        small = start.model
        before, after = (None if score is None else score.value for score in start.scores)
    weights = dict(small.named_parameters())
    origin = Origin(
        **asdict(key),
        run=str(run),
        dense=source.finished.accuracy,
        compressed=tuple(names),
        sparsity=sparsity({name: weights[name] for name in names}),
        model_sparsity=sparsity(weights),
        before=before,
        after=after,
    )
    with locked(folder):
        written = read_origin(folder, key)
        if written is not None:  # another process was faster
            return written
        save_model(small, folder / START)
        write_atomically(folder / ORIGIN, json_text.dump(origin))
    return origin


def load_start(folder: Path, recipe: Recipe, *, classes: int, origin: Origin) -> Start:
    """Returns the start that `write_start` wrote, on the CPU, with the masks to hold.

    Training always starts from the file, so that an interrupted training continues from the same
    weights on any machine.
    """
    model = build_initial_model(recipe, classes=classes, seed=0, pretrained=False)
    load_model_(model, folder / START)
    if not origin.holds_masks:
        return Start(model)
    weights = dict(model.named_parameters())
    return Start(model, masks_of({name: weights[name] for name in origin.compressed}))


def _replace_head_(model: nn.Module, classes: int, seed: int) -> set[str]:
    """Replaces the head of a model on the CPU; returns the names of the new parameters."""
    earlier = dict(model.named_parameters())
    with global_seed(seed):
        replace_head_(model, classes)
    return {name for name, value in model.named_parameters() if value is not earlier.get(name)}


class _Compressed(NamedTuple):
    """A compressed model, and its scores before and after batch-norm tuning."""

    model: nn.Module
    scores: tuple[Score | None, Score | None]


def _compress(
    source: Trained,
    model: nn.Module,
    key: StartKey,
    *,
    recipe: Recipe,
    data: Dataset,
    device: torch.device,
) -> _Compressed:
    """Returns a compressed copy of a model; tuned and scored unless it gets a new head."""
    if key.at == DENSE:
        score = None
        if not key.new_head:
            score = score_on_test(model, recipe, data, device=device)
        return _Compressed(model, (score, score))
    if key.at == TRAINED:  # the zeros are there already
        return _Compressed(model, (None, None))
    operator, calibration = parse_pruner(key.at), data
    if looks_at_data(operator):
        if not isinstance(operator, Pruner):
            raise _not_a_pruning(operator)
        if key.new_head:
            raise _looks_at_source_data(key.at)
        stop = recipe.train.early_stopping
        if stop is not None:  # no pruner sees what early stopping holds out
            calibration = recipe.build_task().hold_out(data, stop.held_out)
    elif not _only_prunes(operator, model, source.recipe):
        raise _not_a_pruning(operator)
    (small,) = compressed_models(
        model,
        source.recipe,
        data,
        [key.at],
        device=device,
        seed=key.seed,
        trials=0 if key.new_head else 1,
        score_before=not key.new_head,
        score_after=not key.new_head,
        calibration=calibration,
    )
    return _Compressed(small.model, (small.before, small.after[0] if small.after else None))


def _only_prunes(operator: Operator, model: nn.Module, recipe: Recipe) -> bool:
    """Whether an operator sets weights to zero and leaves the others as they are."""
    small = copy.deepcopy(model)
    weights = target_weights(recipe, small)
    masks = compress_(small, operator, weights=weights)
    original = dict(model.named_parameters())
    return masks is not None and all(
        torch.equal(weights[name], original[name].masked_fill(mask.logical_not(), 0))
        for name, mask in masks.items()
    )


def _looks_at_source_data(at: str) -> ValueError:
    return ValueError(
        f"{at} looks at the data that the model was trained on, which a transfer does not have; "
        f"allowed: operators such as global:0.9, and {DENSE!r}"
    )


def _not_a_pruning(operator: Operator) -> ValueError:
    return ValueError(
        f"{operator} does more than set weights to zero, which fine-tuning would undo; allowed: "
        "operators that only set weights to zero, such as global:0.9 or nm:2:4, pruners, and "
        f"{DENSE!r}"
    )


@dataclass(frozen=True, eq=False)
class FineTuned:
    """A finished fine-tuning or transfer.

    Attributes:
        trained: Finished training.
        origin: Model that it started from.
        sparsity: Fraction of zeros at the end in the weights that were compressed.
        model_sparsity: Fraction of zeros at the end in all parameters.
    """

    trained: Trained
    origin: Origin
    sparsity: float
    model_sparsity: float

    def as_result(self) -> SeedResult:
        """Returns a result with one target: one-shot accuracy as `before`, this as `after`."""
        origin, info, finished = self.origin, self.trained.info, self.trained.finished
        if origin.after is None:
            raise ValueError(f"{self.trained.recipe.name}: a new head has no one-shot accuracy")
        target = TargetResult(
            operator=origin.at,
            sparsity=self.sparsity,
            model_sparsity=self.model_sparsity,
            before=origin.after,
            after=finished.accuracy,
            others=finished.others,
        )
        return SeedResult(
            seed=info.seed,
            dense=origin.dense,
            seconds=finished.seconds,
            targets=(target,),
            machine=info.machine,
            versions=dict(info.versions),
            processes=finished.processes,
            epochs=finished.epochs,
        )


def finetune(
    run_folder: Path,
    at: str,
    out: Path,
    *,
    recipe: Recipe,
    data: Dataset,
    device: torch.device,
    new_head: bool = False,
    seed: int | None = None,
    make_step: MakeStep = EagerStep,
    eval_interval: int = 1,
    progress: Progress | None = None,
) -> FineTuned:
    """Compresses the model of a run, tunes its batch norm, and trains on with the masks held.

    Where the recipe has `train.distillation`, the teacher is the model before compression. Like
    `train`, it continues where an earlier call on the same folder stopped.

    Args:
        run_folder: Folder of a finished training.
        at: Operator that only sets weights to zero, or pruner, as text; "dense" does not compress,
            and "trained", for a new head, keeps the zeros that a method trained.
        out: Folder of the new run.
        recipe: Recipe of the fine-tuning, from `finetune_recipe` or `transfer_recipe`.
        data: Dataset to train and test on.
        device: Device that everything is computed on.
        new_head: Whether to replace the last layer by a new one for the classes of `data`. The new
            layer has no mask.
        seed: Seed of the head, the batches and the calibration; by default that of the run.
        make_step: Function that makes the `Step`: eager, or as CUDA graphs.
        eval_interval: Number of epochs between two tests.
        progress: Function that is called after every epoch.

    Raises:
        ValueError: If the operator does more than set weights to zero, the recipe has another
            model, the data differs and there is no new head, the folder holds another run, or a
            pruned weight is not zero after training.
    """
    source = load_trained(run_folder, torch.device("cpu"))
    if new_head:
        require_new_head(source.recipe, recipe)
    ours, theirs = source.recipe.model.name, recipe.model.name
    if ours != theirs:
        raise ValueError(f"{run_folder} has the model {ours!r}, {recipe.name} has {theirs!r}")
    known, needed = len(source.info.data.classes), len(data.classes)
    if known != needed and not new_head:
        raise ValueError(
            f"{run_folder} has {known} classes, {data.name!r} has {needed}: the model needs a new "
            "head, which `torchcram transfer` adds"
        )
    different = explain_differences(plain(source.info.data), plain(DataInfo.of(data)))
    if different and not new_head:
        raise ValueError(f"{run_folder} was trained on other data: {'; '.join(different)}")
    seed = source.info.seed if seed is None else seed
    key = start_key(source, at, new_head=new_head, seed=seed)
    origin = read_origin(out, key)  # refuses the folder of another run before any work
    if origin is None:
        origin = write_start(
            out, source, run=run_folder, key=key, recipe=recipe, data=data, device=device
        )
    start = load_start(out, recipe, classes=needed, origin=origin)
    if recipe.train.distillation is not None:
        start = replace(start, teacher=source.model)
    trained = train(
        recipe,
        out,
        data=data,
        seed=seed,
        device=device,
        start=start,
        make_step=make_step,
        eval_interval=eval_interval,
        progress=progress,
    )
    return _checked(out, trained, origin, start)


def require_new_head(source: Recipe, recipe: Recipe) -> None:
    """Raises ValueError if a recipe cannot train a model of another one with a new head.

    Args:
        source: Recipe that the model was trained with.
        recipe: Recipe of the transfer.
    """
    for task in (source.build_task(), recipe.build_task()):
        task.require_transfer()
    if recipe.train.distillation is not None:
        raise ValueError(
            f"{recipe.name}: train.distillation needs a teacher with the same classes, and a new "
            "head has other classes; allowed: null"
        )
    if recipe.method is not None:
        raise ValueError(
            f"{recipe.name}: the section method chooses zeros of its own, and a transfer holds "
            "those that the model has; allowed: null"
        )
    if recipe.lora is not None:
        raise ValueError(
            f"{recipe.name}: the section lora trains adapters, and a transfer trains a new head; "
            "allowed: null"
        )


def check_operator(source: Trained, at: str) -> None:
    """Raises ValueError unless an operator can compress a model for a new head.

    Args:
        source: Training whose model would be compressed.
        at: Operator as `finetune` takes it.
    """
    if at in (DENSE, TRAINED):
        return
    operator = parse_pruner(at)
    if looks_at_data(operator):
        raise _looks_at_source_data(at)
    if not _only_prunes(operator, source.model, source.recipe):
        raise _not_a_pruning(operator)


def check_new_head(source: Trained, recipe: Recipe, data: Dataset) -> None:
    """Raises ValueError unless a model with a new head takes the data of a transfer.

    Args:
        source: Training whose model would get the head; it stays unchanged.
        recipe: Recipe of the transfer.
        data: Dataset of that recipe.
    """
    task, model = recipe.build_task(), copy.deepcopy(source.model)
    if recipe.train.early_stopping is not None:
        task.divide_epochs(data, 1)
    _replace_head_(model, len(data.classes), seed=0)
    task.check_model(model, data, device=torch.device("cpu"))


def _checked(out: Path, trained: Trained, origin: Origin, start: Start) -> FineTuned:
    weights = {name: value.detach().cpu() for name, value in trained.model.named_parameters()}
    for name, mask in (start.masks or {}).items():
        if back := int(weights[name][mask.logical_not()].count_nonzero()):
            raise ValueError(f"{out}: {back} pruned weights of {name!r} are not zero any more")
    compressed = {name: weights[name] for name in origin.compressed}
    return FineTuned(trained, origin, sparsity(compressed), sparsity(weights))


@dataclass(frozen=True, eq=False)
class Trial:
    """A training with one choice of settings, and its score.

    Attributes:
        overrides: Settings on top of the recipe, such as "optimizer.lr=3e-5".
        folder: Folder of the run.
        held_out: Metric on the held-out part of the training split.
    """

    overrides: Overrides
    folder: Path
    held_out: float


@dataclass(frozen=True, eq=False)
class FinetuneTrial(Trial):
    """A fine-tuning with early stopping; its score is the best of all rounds.

    Attributes:
        rounds: Number of rounds; each ends with a test.
        finetuned: Fine-tuned model. Its score on the test split plays no part in the choice.
    """

    rounds: int
    finetuned: FineTuned


AnyTrial = TypeVar("AnyTrial", bound=Trial)


@dataclass(frozen=True, eq=False)
class Grid(Generic[AnyTrial]):
    """The trials of a grid of settings.

    Attributes:
        trials: Trials that finished, the best on the held-out part first.
        failed: Error messages of the trials whose loss was not finite, by their settings.
    """

    trials: list[AnyTrial]
    failed: dict[Overrides, str]

    @property
    def best(self) -> AnyTrial:
        """The trial that is chosen."""
        return self.trials[0]


def run_trials(
    recipes: Mapping[Overrides, Recipe],
    out: Path,
    run_trial: Callable[[Overrides, Path], AnyTrial],
) -> Grid[AnyTrial]:
    """Trains with every recipe, each in its own folder, all from the same weights.

    A trial whose loss is not finite fails, and the others go on.

    Args:
        recipes: Recipes by the settings in which they differ.
        out: Folder that the folders of the trials are made in.
        run_trial: Function that trains with settings in a folder, or continues there, and returns
            the trial. The folder may hold the start of the training already.

    Raises:
        FloatingPointError: If every trial fails.
    """
    folders = {overrides: out / folder_name(overrides) for overrides in recipes}
    trials: list[AnyTrial] = []
    failed: dict[Overrides, str] = {}
    for overrides, folder in folders.items():
        started = [path for path in folders.values() if _has_start(path)]
        if started and not (folder / RUN).exists():
            _share_start(started[0], folder)
        try:
            trials.append(run_trial(overrides, folder))
        except FloatingPointError as error:
            failed[overrides] = str(error)
    if not trials:
        first = next(iter(failed))
        raise FloatingPointError(
            f"every training failed; the first, {' '.join(first)}: {failed[first]}"
        )
    metric = next(iter(recipes.values())).metric
    trials.sort(key=lambda trial: goodness(trial.held_out, metric), reverse=True)
    return Grid(trials, failed)


def _has_start(folder: Path) -> bool:
    """Whether a folder has a start that is complete, and was not removed."""
    return (folder / START).exists() and (folder / ORIGIN).exists()


def _share_start(source: Path, folder: Path) -> None:
    """Copies the start of another trial; one computed again might differ in the last digits."""
    with locked(folder):
        if not (folder / ORIGIN).exists():
            for name in (START, ORIGIN):  # the start is complete once the second exists
                write_atomically(folder / name, (source / name).read_bytes())


def finetune_grid(
    run_folder: Path,
    at: str,
    out: Path,
    *,
    recipes: Mapping[Overrides, Recipe],
    data: Dataset,
    device: torch.device,
    seed: int | None = None,
    make_step: MakeStep = EagerStep,
    progress: Callable[[str], Progress] | None = None,
) -> Grid[FinetuneTrial]:
    """Fine-tunes with every recipe, as `run_trials` does.

    Args:
        run_folder: Folder of a finished training.
        at: Operator or pruner, as `finetune` takes it.
        out: Folder that the folders of the trials are made in.
        recipes: Recipes by the settings in which they differ; all have early stopping.
        data: Dataset to train and test on.
        device: Device that everything is computed on.
        seed: Seed, as `finetune` takes it.
        make_step: Function that makes the `Step`: eager, or as CUDA graphs.
        progress: Function that takes the settings of a trial and returns its progress function.

    Raises:
        ValueError: If the recipes do not hold out the same part, or if `finetune` refuses
            something.
        FloatingPointError: If every trial fails.
    """
    tasks = [recipe.build_task() for recipe in recipes.values()]
    tasks[0].require_same_data(tasks)
    stops = [recipe.train.early_stopping for recipe in recipes.values()]
    if None in stops:
        raise ValueError(
            "a grid is scored on the part that train.early_stopping holds out, and it is null; "
            "allowed: recipes for texts with train.early_stopping"
        )
    if len({stop.held_out for stop in stops if stop}) > 1:
        raise ValueError(
            "train.early_stopping.held_out differs between the points of the grid; it must be the "
            "same, as they are compared on that part"
        )

    def run_trial(overrides: Overrides, folder: Path) -> FinetuneTrial:
        finetuned = finetune(
            run_folder,
            at,
            folder,
            recipe=recipes[overrides],
            data=data,
            device=device,
            seed=seed,
            make_step=make_step,
            progress=None if progress is None else progress(" ".join(overrides)),
        )
        values = held_out_values(folder)
        held_out = values[best_index(values, tasks[0].metric)]
        return FinetuneTrial(overrides, folder, held_out, len(values), finetuned)

    return run_trials(recipes, out, run_trial)
