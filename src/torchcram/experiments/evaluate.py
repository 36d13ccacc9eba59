"""Test accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.build import build_batches
from torchcram.experiments.step import autocast

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
) -> float:
    """Returns the fraction of images that `model`, in eval mode meanwhile, gets right.

    The device is waited for once, at the end.

    Args:
        model: on `device`; all its modules are in the mode they were in afterwards.
        batches: images and labels.
        device: that they are moved to.
        precision: "fp32", or "bf16" for autocast on a GPU.

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
    if not total:
        raise ValueError("there is nothing to evaluate on: no batch came")
    return int(right) / total


def accuracy_on_test(
    model: nn.Module, recipe: Recipe, data: DataSet | PictureSet, *, device: torch.device
) -> float:
    """Returns the accuracy of `model` on the test images, in the precision of the recipe."""
    batches = build_batches(recipe, data, train=False, device=device, seed=0)
    return evaluate(model, batches.epoch(0), device, precision=recipe.train.precision)
