"""Fine-tuning with masks held, and transfer to other data, of a finished and compressed model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

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
from torchcram.experiments.models import replace_head_
from torchcram.experiments.recipe.build import build_initial_model, target_weights, to_device
from torchcram.experiments.recipe.overrides import DENSE, Overrides, folder_name, read_at
from torchcram.experiments.seeds import global_seed
from torchcram.experiments.training.run_folder import RUN, DataInfo
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.trainer import (
    Progress,
    Start,
    Trained,
    held_out_values,
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
class Asked:
    """What a start depends on.

    Attributes:
        at: the operator that the model is compressed by, or "dense".
        new_head: whether its last layer is replaced.
        weights: digest of the model that is compressed.
        seed: of the new head and of the calibration.
    """

    at: str
    new_head: bool
    weights: str
    seed: int


@dataclass(frozen=True)
class Origin(Asked):
    """Where a training started.

    Attributes:
        run: folder of the run that the model is from.
        dense: test accuracy of that run, from 0 to 1.
        compressed: names of the weights that were compressed, a new head not among them.
        sparsity: zeros among them.
        model_sparsity: zeros among all parameters.
        before: test accuracy from 0 to 1, as compressed; None with a new head.
        after: the same after batch-norm tuning.
    """

    run: str
    dense: float
    compressed: tuple[str, ...]
    sparsity: float
    model_sparsity: float
    before: float | None
    after: float | None

    @property
    def held(self) -> bool:
        """Whether zeros are held."""
        return self.at != DENSE


def read_origin(folder: Path, asked: Asked | None = None) -> Origin | None:
    """Returns where the run of a folder started; None where there is none yet.

    Args:
        folder: need not be there.
        asked: what its start is to be.

    Raises:
        ValueError: if the folder is of another run, naming in what they differ.
    """
    path = folder / ORIGIN
    if not path.exists():
        if (folder / RUN).exists():
            raise ValueError(f"{folder} holds another run: it did not start from a finished one")
        return None
    origin = json_text.parse(Origin, path.read_bytes(), str(path))
    wanted = {} if asked is None else asdict(asked)
    if different := explain_differences({key: getattr(origin, key) for key in wanted}, wanted):
        said = "; ".join(different)
        raise ValueError(
            f"{folder} holds another run: {said}; give this one another folder (--out)"
        )
    return origin


def write_start(
    folder: Path,
    source: Trained,
    *,
    run: Path,
    asked: Asked,
    recipe: Recipe,
    data: Dataset,
    device: torch.device,
) -> Origin:
    """Compresses a trained model, tunes its batch norm, scores it and writes it.

    Args:
        folder: Folder of the new run; the start counts once its origin is there.
        source: Training whose model is compressed, by its own recipe.
        run: Folder of that training.
        asked: What the start depends on.
        recipe: Recipe for training on.
        data: Dataset to calibrate and test on.
        device: Device that everything is computed on.

    Raises:
        ValueError: If training would undo what the operator does, if the data is not what the model
            was trained on where a pruner needs that, or if the model does not take the data.
    """
    model = to_device(copy.deepcopy(source.model), device)
    task, names = recipe.build_task(), list(target_weights(source.recipe, model))
    before: float | None = None
    after: float | None = None
    if asked.new_head:
        small = _compress(source, model, asked, recipe=recipe, data=data, device=device).model
        fresh = _replace_head_(small.cpu(), len(data.classes), asked.seed)
        names = [name for name in names if name not in fresh]
        small = to_device(small, device)
        task.check_model(small, data, device=device)
        if asked.at != DENSE:
            tune_(small, recipe, data, device=device, seed=asked.seed)
    else:
        task.check_model(model, data, device=device)
        start = _compress(source, model, asked, recipe=recipe, data=data, device=device)
        small = start.model
        before, after = (None if score is None else score.value for score in start.scores)
    weights = dict(small.named_parameters())
    origin = Origin(
        **asdict(asked),
        run=str(run),
        dense=source.finished.accuracy,
        compressed=tuple(names),
        sparsity=sparsity({name: weights[name] for name in names}),
        model_sparsity=sparsity(weights),
        before=before,
        after=after,
    )
    with locked(folder):
        written = read_origin(folder, asked)
        if written is not None:  # by another process, meanwhile
            return written
        save_model(small, folder / START)
        write_atomically(folder / ORIGIN, json_text.dump(origin))
    return origin


def load_start(folder: Path, recipe: Recipe, *, classes: int, origin: Origin) -> Start:
    """Returns the start that `write_start` wrote, on the CPU, with the masks to hold.

    Training starts from the file, so that an interrupted one continues from the same weights
    wherever these were computed.
    """
    model = build_initial_model(recipe, classes=classes, seed=0, pretrained=False)
    load_model_(model, folder / START)
    if not origin.held:
        return Start(model)
    weights = dict(model.named_parameters())
    return Start(model, masks_of({name: weights[name] for name in origin.compressed}))


def _replace_head_(model: nn.Module, classes: int, seed: int) -> set[str]:
    """Puts a head of the seed on a model that is on the CPU; returns what belongs to it."""
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
    asked: Asked,
    *,
    recipe: Recipe,
    data: Dataset,
    device: torch.device,
) -> _Compressed:
    """Returns a compressed copy of a model; tuned and scored unless it gets a new head."""
    if asked.at == DENSE:
        score = None
        if not asked.new_head:
            score = score_on_test(model, recipe, data, device=device)
        return _Compressed(model, (score, score))
    operator, calibration = parse_pruner(asked.at), data
    if looks_at_data(operator):
        if not isinstance(operator, Pruner):
            raise _undone(operator)
        if asked.new_head:
            raise ValueError(
                f"{asked.at} looks at the data that the model was trained on, not at "
                f"{data.name!r}; allowed: operators such as global:0.9, and {DENSE!r}"
            )
        stop = recipe.train.early_stopping
        if stop is not None:  # no pruner sees what early stopping holds out
            calibration = recipe.build_task().hold_out(data, stop.held_out)
    elif not _only_prunes(operator, model, source.recipe):
        raise _undone(operator)
    (small,) = compressed_models(
        model,
        source.recipe,
        data,
        [asked.at],
        device=device,
        seed=asked.seed,
        trials=0 if asked.new_head else 1,
        score_before=not asked.new_head,
        score_after=not asked.new_head,
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


def _undone(operator: Operator) -> ValueError:
    return ValueError(
        f"{operator} changes weights other than to zero, and training on would undo that; allowed: "
        "operators that only set weights to zero, such as global:0.9 or nm:2:4, pruners, and "
        f"{DENSE!r}"
    )


@dataclass(frozen=True, eq=False)
class Derived:
    """A finished training that started from another.

    Attributes:
        trained: what came out.
        origin: where it started.
        sparsity: zeros among the weights that were compressed, at the end.
        model_sparsity: the same among all parameters.
    """

    trained: Trained
    origin: Origin
    sparsity: float
    model_sparsity: float

    def as_result(self) -> SeedResult:
        """Returns it as a target of the run that it is from: what one shot gave, and what this."""
        origin, info, finished = self.origin, self.trained.info, self.trained.finished
        if origin.after is None:
            raise ValueError(f"{self.trained.recipe.name}: with a new head there is no one shot")
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
) -> Derived:
    """Compresses the model of a run, tunes its batch norm, and trains on with the masks held.

    Where the recipe has `train.distillation`, it learns from the model as that was before. As
    `train`, it continues where an earlier call on the same folder stopped.

    Args:
        run_folder: of a finished training.
        at: an operator that only sets weights to zero, or a pruner, as text; or "dense" for none.
        out: folder for the new run.
        recipe: for training on; `finetune_recipe` or `transfer_recipe` makes it.
        data: to train and test on.
        device: of all that is computed.
        new_head: whether to replace the last layer by a fresh one for the classes of `data`, which
            has no mask.
        seed: of the head, the batches and the calibration; by default that of the run.
        make_step: how steps are taken.
        eval_interval: test accuracy is measured after every so many epochs.
        progress: told of every epoch.

    Raises:
        ValueError: for an operator that does more than set weights to zero, for a recipe with
            another model, for other data without a new head, for a folder of another run, and if a
            weight that was zero is not any more.
    """
    source = load_trained(run_folder, torch.device("cpu"))
    ours, theirs = source.recipe.model.name, recipe.model.name
    if ours != theirs:
        raise ValueError(f"{run_folder} has the model {ours!r}, {recipe.name} has {theirs!r}")
    if new_head:
        for task in (source.recipe.build_task(), recipe.build_task()):
            task.require_transfer()
    if new_head and recipe.train.distillation is not None:
        raise ValueError(
            f"{recipe.name}: train.distillation learns from a model of the same classes, and a new "
            "head has others; allowed: null"
        )
    known, needed = len(source.info.data.classes), len(data.classes)
    if known != needed and not new_head:
        raise ValueError(
            f"{run_folder} has {known} classes, {data.name!r} has {needed}: that takes a new head, "
            "as `torchcram transfer` gives it"
        )
    different = explain_differences(plain(source.info.data), plain(DataInfo.of(data)))
    if different and not new_head:
        raise ValueError(f"{run_folder}: the run is of other data: {'; '.join(different)}")
    at = read_at(at)
    seed = source.info.seed if seed is None else seed
    asked = Asked(at, new_head, digest(source.model.state_dict()), seed)
    origin = read_origin(out, asked)  # refuses the folder of another run before anything is made
    if origin is None:
        origin = write_start(
            out, source, run=run_folder, asked=asked, recipe=recipe, data=data, device=device
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


def _checked(out: Path, trained: Trained, origin: Origin, start: Start) -> Derived:
    weights = {name: value.detach().cpu() for name, value in trained.model.named_parameters()}
    for name, mask in (start.masks or {}).items():
        if back := int(weights[name][mask.logical_not()].count_nonzero()):
            raise ValueError(f"{out}: {back} weights of {name!r} were zero, and are not any more")
    compressed = {name: weights[name] for name in origin.compressed}
    return Derived(trained, origin, sparsity(compressed), sparsity(weights))


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
    data: Dataset,
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
    tasks = [recipe.build_task() for recipe in recipes.values()]
    tasks[0].require_same_data(tasks)
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
