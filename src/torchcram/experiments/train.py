"""Training by a recipe, which can be stopped at any moment and continued exactly."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.build import build_initial_model, place
from torchcram.experiments.checkpoint import own_randomness
from torchcram.experiments.evaluate import require_fit
from torchcram.experiments.files import locked
from torchcram.experiments.loop import Loop, Progress
from torchcram.experiments.run import Run, Start
from torchcram.experiments.run_folder import (
    MODEL,
    DataInfo,
    Finished,
    RunInfo,
    load_model_,
    open_run,
    read_run,
)
from torchcram.experiments.step import EagerStep, MakeStep
from torchcram.experiments.versions import machine_name, versions

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchcram.experiments.data import DataSet, PictureSet
    from torchcram.experiments.recipe import Recipe

__all__ = ["Progress", "Start", "Trained", "load_trained", "train"]


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
    data: DataSet | PictureSet,
    seed: int,
    device: torch.device,
    start: Start | None = None,
    eval_interval: int = 1,
    checkpoint_interval: int = 1,
    make_step: MakeStep = EagerStep,
    progress: Progress | None = None,
) -> Trained:
    """Trains a model, or continues where an earlier call on the same folder stopped.

    Whatever stops it, the checkpoint of the last whole epoch is there. On a CPU the weights that
    come out are, bit for bit, those of a training that was never stopped. On a folder in which the
    training is finished it returns at once. No global random generator is left changed.

    Args:
        recipe: what to do.
        folder: of the run; `run_folder` says what is in it.
        data: to train and test on.
        seed: of the initial weights, the batches and the draws.
        device: of all that is computed.
        start: a model to start from, and masks to hold.
        eval_interval: test accuracy is measured after every so many epochs, and after the last.
        checkpoint_interval: a checkpoint is written after every so many, and after the last.
        make_step: how steps are taken.
        progress: told of every epoch, and now and then in between.

    Raises:
        ValueError: if the folder is of another run, naming in what they differ, or if the model
            does not take such images.
        FloatingPointError: if the loss is not finite.
    """
    for name, every in (("eval", eval_interval), ("checkpoint", checkpoint_interval)):
        if every < 1:
            raise ValueError(f"{name}_interval={every!r} is not a positive number")
    asked = RunInfo(
        seed=seed,
        data=DataInfo.of(data),
        start=None if start is None else start.digest,
        machine=machine_name(device),
        versions=versions(),
    )
    with locked(folder), own_randomness(device, seed):
        info = open_run(folder, recipe, asked)
        if info.finished is None or not (folder / MODEL).exists():
            run = Run.resume(recipe, folder, info, start=start, device=device)
            require_fit(run.model, recipe, data, device=device)
            with run.held_masks(start):
                loop = Loop(run, data, make_step, progress)
                run.finish(loop, eval_interval, checkpoint_interval)
    return load_trained(folder, device)


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
