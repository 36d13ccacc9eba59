"""Training by a recipe, which can be stopped at any moment and continued exactly."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.evaluation.evaluate import require_fit
from torchcram.experiments.io.files import locked
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.training.build import build_initial_model, place
from torchcram.experiments.training.checkpoint import own_randomness
from torchcram.experiments.training.data_parallel import strides_as_they_come
from torchcram.experiments.training.loop import Loop, Progress
from torchcram.experiments.training.run import Run, Start
from torchcram.experiments.training.run_folder import (
    MODEL,
    DataInfo,
    Finished,
    RunInfo,
    identity,
    load_model_,
    open_run,
    read_run,
)
from torchcram.experiments.training.steps import EagerStep, MakeStep
from torchcram.experiments.training.stopping import StoppingRun
from torchcram.experiments.versions import machine_name, versions

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe

__all__ = ["Progress", "Start", "Trained", "load_trained", "train"]

CPU = torch.device("cpu")
PATIENCE = 15.0  # seconds; workers that decode images look every 5 whether they are orphans


@dataclass(frozen=True, eq=False)
class Trained:
    """A finished training: its recipe, what its folder says of it, and the dense model."""

    recipe: Recipe
    info: RunInfo
    finished: Finished
    model: nn.Module


def train(
    recipe: Recipe,
    folder: Path,
    *,
    data: AnyData,
    seed: int,
    device: torch.device,
    start: Start | None = None,
    eval_interval: int = 1,
    checkpoint_interval: int = 1,
    make_step: MakeStep = EagerStep,
    progress: Progress | None = None,
    ranks: Ranks = SINGLE,
) -> Trained:
    """Trains a model, or continues where an earlier call on the same folder stopped.

    Whatever stops it, the checkpoint of the last whole epoch is there. On a CPU the weights that
    come out are, bit for bit, those of a training that was never stopped. On a folder in which the
    training is finished it returns at once. No global random generator is left changed.

    Several processes call it together; it returns the same to all of them. Each takes its part of
    every batch, and the first one reads and writes the folder. How many they are is no part of what
    the run is: others, or one alone, may continue it.

    Args:
        recipe: what to do.
        folder: of the run; `run_folder` says what is in it.
        data: to train and test on.
        seed: of the initial weights, the batches and the draws.
        device: of all that is computed.
        start: a model to start from, masks to hold, and a model to learn from.
        eval_interval: test accuracy is measured after every so many epochs, and after the last.
        checkpoint_interval: a checkpoint is written after every so many, and after the last.
        make_step: how steps are taken.
        progress: told of every epoch, and now and then in between; only in the first process.
        ranks: Processes that share the work; rank 0 writes the files.

    Raises:
        ValueError: if the folder is of another run, naming in what they differ, if the model does
            not take such images, if processes are given different work, or if the recipe has
            `train.distillation` and `start` no teacher.
        FloatingPointError: if the loss is not finite.
    """
    for name, every in (("eval", eval_interval), ("checkpoint", checkpoint_interval)):
        if every < 1:
            raise ValueError(f"{name}_interval={every!r} is not a positive number")
    if recipe.train.distillation is not None:
        make_step = partial(make_step, teacher=_teacher(start, recipe, device))
    asked = RunInfo(
        seed=seed,
        data=DataInfo.of(data),
        start=None if start is None else start.digest,
        machine=machine_name(device),
        versions=versions(),
    )
    intervals = {"eval_interval": eval_interval, "checkpoint_interval": checkpoint_interval}
    ranks.require_same({**identity(recipe, asked), **intervals, "device": device.type})
    with ExitStack() as held:
        held.enter_context(own_randomness(device, seed))
        info, finished = ranks.broadcast_from_rank0(
            lambda: _open(folder, recipe, asked, held, ranks)
        )
        if not finished:
            kind = Run if recipe.train.early_stopping is None else StoppingRun
            run = ranks.run_on_all(
                lambda: kind.resume(recipe, folder, info, start=start, device=device, ranks=ranks)
            )
            ranks.run_on_all(lambda: require_fit(run.model, recipe, data, device=device))
            with run.held_masks(start), strides_as_they_come():
                told = progress if ranks.is_first else None
                if isinstance(run, StoppingRun):
                    run.finish_early(data, make_step, told)
                else:
                    loop = Loop(run, data, make_step, told)
                    run.finish(loop, eval_interval, checkpoint_interval)
    if ranks.world_size == 1:
        return load_trained(folder, device)
    trained = ranks.broadcast_from_rank0(lambda: load_trained(folder, CPU))
    return replace(trained, model=place(trained.model, device))


def _teacher(start: Start | None, recipe: Recipe, device: torch.device) -> nn.Module:
    """Returns a copy of the model to learn from, which nothing changes."""
    if start is None or start.teacher is None:
        raise ValueError(
            f"{recipe.name}: train.distillation takes a dense model to learn from, which only "
            "fine-tuning has; allowed here: null"
        )
    return place(copy.deepcopy(start.teacher), device).eval().requires_grad_(False)


def _open(
    folder: Path, recipe: Recipe, asked: RunInfo, held: ExitStack, ranks: Ranks
) -> tuple[RunInfo, bool]:
    """Locks and opens the folder; returns what it says of the run, and whether that is finished.

    Where several processes began anew, what is left of the ones before may still hold the lock.
    """
    held.enter_context(locked(folder, patience=0 if ranks.world_size == 1 else PATIENCE))
    info = open_run(folder, recipe, asked)
    return info, info.finished is not None and (folder / MODEL).exists()


def load_trained(folder: Path, device: torch.device) -> Trained:
    """Returns what a finished training left in its folder, the model on `device` in eval mode.

    Raises:
        ValueError: naming the file, if the folder is of no run, or the run is not finished.
    """
    recipe, info = read_run(folder)
    if info.finished is None or not (folder / MODEL).exists():
        raise ValueError(f"{folder}: the training is not finished; train again to continue it")
    model = build_initial_model(recipe, classes=len(info.data.classes), seed=0, pretrained=False)
    load_model_(model, folder / MODEL)
    return Trained(recipe, info, info.finished, place(model, device).eval())
