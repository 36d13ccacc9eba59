"""Test accuracy, and the batch-norm tuning before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from torchcram import tune_batchnorm_
from torchcram.experiments.data.images import calibration_batches
from torchcram.experiments.data.text.batches import TextBatches
from torchcram.experiments.data.text.datasets import TextSet
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.seeds import mixed
from torchcram.experiments.tasks.score import Score
from torchcram.experiments.tasks.text_fit import require_fit_of_texts
from torchcram.experiments.tasks.text_score import text_score
from torchcram.experiments.training.build import build_batches, image_shape
from torchcram.experiments.training.steps import autocast
from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.training.steps import Batches


@torch.no_grad()
def evaluate(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    *,
    precision: str = "fp32",
    ranks: Ranks = SINGLE,
) -> float:
    """Returns the fraction of images that `model`, in eval mode meanwhile, gets right.

    The device is waited for once, at the end.

    Args:
        model: on `device`; all its modules are in the mode they were in afterwards.
        batches: images and labels; those of this process where there are several.
        device: that they are moved to.
        precision: "fp32", or "bf16" for autocast on a GPU.
        ranks: Processes that share the work; rank 0 writes the files.

    Raises:
        ValueError: if `batches` is empty.
    """
    right = torch.zeros((), dtype=torch.int64, device=device)
    total = 0
    with eval_mode(model):
        for images, labels in batches:
            with autocast(device, precision):
                scores = model(images.to(device, non_blocking=True))
            right += (scores.argmax(1) == labels.to(device, non_blocking=True)).sum()
            total += len(labels)
    all_right, images_seen = ranks.all_reduce_sum(int(right), total)
    if not images_seen:
        raise ValueError("there is nothing to evaluate on: no batch came")
    return all_right / images_seen


@torch.no_grad()
def score(
    model: nn.Module,
    data: AnyData,
    batches: Batches,
    *,
    device: torch.device,
    precision: str = "fp32",
    ranks: Ranks = SINGLE,
) -> Score:
    """Returns what `model`, in eval mode meanwhile, comes to by the metric of its task.

    Args:
        model: on `device`; all its modules are in the mode they were in afterwards.
        data: that it is tested on.
        batches: of its test split; those of this process where there are several.
        device: of the model.
        precision: "fp32", or "bf16" for autocast on a GPU.
        ranks: Processes that share the work; rank 0 writes the files.
    """
    if isinstance(data, TextSet) and isinstance(batches, TextBatches):
        with eval_mode(model):
            return text_score(
                model, batches, data.task, device=device, precision=precision, ranks=ranks
            )
    return Score(evaluate(model, batches.epoch(0), device, precision=precision, ranks=ranks))


@torch.no_grad()
def require_fit(model: nn.Module, recipe: Recipe, data: AnyData, *, device: torch.device) -> None:
    """Raises ValueError if `model`, on `device`, cannot take the data."""
    if isinstance(data, TextSet):
        require_fit_of_texts(model, recipe.model.name, data)
        return
    shape = image_shape(recipe, data)
    try:
        scores = model.eval()(torch.zeros(1, *shape, device=device))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"model {recipe.model.name!r} does not take the images of {data.name!r}, "
            f"{'x'.join(map(str, shape))}: {error}"
        ) from error
    given = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
    if given != (1, len(data.classes)):
        raise ValueError(
            f"model {recipe.model.name!r} gives {given} for an image of {data.name!r}; allowed: a "
            f"tensor of shape {(1, len(data.classes))}, a score for every class"
        )


def score_on_test(
    model: nn.Module, recipe: Recipe, data: AnyData, *, device: torch.device
) -> Score:
    """Returns what `model` comes to on the test split, in the precision of the recipe."""
    batches = build_batches(recipe, data, train=False, device=device, seed=0)
    return score(model, data, batches, device=device, precision=recipe.train.precision)


def accuracy_on_test(
    model: nn.Module, recipe: Recipe, data: AnyData, *, device: torch.device
) -> float:
    """Returns the value of `score_on_test`."""
    return score_on_test(model, recipe, data, device=device).value


def tune_(
    model: nn.Module,
    recipe: Recipe,
    data: AnyData,
    *,
    device: torch.device,
    seed: int,
    trial: int = 0,
) -> None:
    """Estimates the batch-norm statistics of `model` anew, on training images; not with texts.

    Args:
        model: on `device`.
        recipe: says on how many images, and how they are augmented.
        data: that they are from.
        device: of all that is computed.
        seed: of the choice.
        trial: another one makes another choice.
    """
    if isinstance(data, TextSet):
        return
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
