"""Test accuracy, and the batch-norm tuning before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from torchcram import tune_batchnorm_
from torchcram.experiments.build import build_batches, image_shape
from torchcram.experiments.data import calibration_batches
from torchcram.experiments.data.seeds import mixed
from torchcram.experiments.step import autocast
from torchcram.experiments.team import ALONE, Team

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.data import DataSet, PictureSet
    from torchcram.experiments.recipe import Recipe


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    *,
    precision: str = "fp32",
    team: Team = ALONE,
) -> float:
    """Returns the fraction of images that `model`, in eval mode meanwhile, gets right.

    The device is waited for once, at the end.

    Args:
        model: on `device`; all its modules are in the mode they were in afterwards.
        batches: images and labels; those of this process where there are several.
        device: that they are moved to.
        precision: "fp32", or "bf16" for autocast on a GPU.
        team: whose counts are added up.

    Raises:
        ValueError: if `batches` is empty.
    """
    modes = [(module, module.training) for module in model.modules()]
    right = torch.zeros((), dtype=torch.int64, device=device)
    total = 0
    try:
        model.eval()
        for images, labels in batches:
            with autocast(device, precision):
                scores = model(images.to(device, non_blocking=True))
            right += (scores.argmax(1) == labels.to(device, non_blocking=True)).sum()
            total += len(labels)
    finally:
        for module, training in modes:
            module.training = training
    all_right, images_seen = team.sums(int(right), total)
    if not images_seen:
        raise ValueError("there is nothing to evaluate on: no batch came")
    return all_right / images_seen


@torch.no_grad()
def require_fit(
    model: nn.Module, recipe: Recipe, data: DataSet | PictureSet, *, device: torch.device
) -> None:
    """Raises ValueError if `model`, on `device`, cannot take the images; leaves it in eval mode."""
    shape = image_shape(recipe, data)
    try:
        model.eval()(torch.zeros(1, *shape, device=device))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"model {recipe.model.name!r} does not take the images of {data.name!r}, "
            f"{'x'.join(map(str, shape))}: {error}"
        ) from error


def accuracy_on_test(
    model: nn.Module, recipe: Recipe, data: DataSet | PictureSet, *, device: torch.device
) -> float:
    """Returns the accuracy of `model` on the test images, in the precision of the recipe."""
    batches = build_batches(recipe, data, train=False, device=device, seed=0)
    return evaluate(model, batches.epoch(0), device, precision=recipe.train.precision)


def tune_(
    model: nn.Module,
    recipe: Recipe,
    data: DataSet | PictureSet,
    *,
    device: torch.device,
    seed: int,
    trial: int = 0,
) -> None:
    """Estimates the batch-norm statistics of `model` anew, on training images.

    Args:
        model: on `device`.
        recipe: says on how many images, and how they are augmented.
        data: that they are from.
        device: of all that is computed.
        seed: of the choice.
        trial: another one makes another choice.
    """
    batches = calibration_batches(
        data,
        recipe.compress.calibration_samples,
        recipe.train.batch_size,
        augment=recipe.data.augment,
        device=device,
        seed=mixed(seed, trial),
        image_size=recipe.data.image_size,
    )
    with autocast(device, recipe.train.precision):
        tune_batchnorm_(model, batches)
