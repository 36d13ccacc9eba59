"""Trainings that start from a finished one: fine-tuning with masks held, transfer to other data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram import sparsity
from torchcram.experiments.derived_model import small_model
from torchcram.experiments.derived_start import (
    Asked,
    Origin,
    load_start,
    read_origin,
    write_start,
)
from torchcram.experiments.evaluation.results import SeedResult, TargetResult
from torchcram.experiments.io.dataclass_io import plain
from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import locked
from torchcram.experiments.recipe.overrides import read_at
from torchcram.experiments.training.build import target_weights
from torchcram.experiments.training.run_folder import DataInfo, digest
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.trainer import Progress, Start, Trained, load_trained, train

if TYPE_CHECKING:
    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe

CPU = torch.device("cpu")


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
    data: AnyData,
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
    source = load_trained(run_folder, CPU)
    ours, theirs = source.recipe.model.name, recipe.model.name
    if ours != theirs:
        raise ValueError(f"{run_folder} has the model {ours!r}, {recipe.name} has {theirs!r}")
    if new_head and (source.recipe.text or recipe.text) is not None:
        raise ValueError("language models are not transferred yet; allowed: recipes about images")
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
        small = small_model(
            source, at, recipe=recipe, data=data, device=device, seed=seed, new_head=new_head
        )
        with locked(out):
            origin = read_origin(out, asked) or write_start(
                out,
                run_folder,
                source.finished.accuracy,
                asked=asked,
                small=small,
                names=list(target_weights(source.recipe, small)),
                recipe=recipe,
                data=data,
                device=device,
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
