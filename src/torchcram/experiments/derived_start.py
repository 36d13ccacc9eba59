"""The compressed model that fine-tuning and transfer start from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchcram import compress_, compressible_weights, masks_of, sparsity, tune_batchnorm_
from torchcram.experiments.build import place
from torchcram.experiments.data import DataSet, PictureSet, calibration_batches
from torchcram.experiments.data.seeds import mixed
from torchcram.experiments.evaluate import accuracy_on_test
from torchcram.experiments.models import replace_head_
from torchcram.experiments.recipe_changes import DENSE
from torchcram.experiments.step import autocast

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.recipe import Recipe


@dataclass(frozen=True)
class Beginning:
    """A model as fine-tuning or transfer starts from it.

    Attributes:
        compressed: names of the weights that were compressed, a new head not among them.
        held: whether their zeros are held.
        sparsity: zeros among them.
        model_sparsity: zeros among all parameters.
        before: test accuracy from 0 to 1, as compressed; None with a new head.
        after: the same after batch-norm tuning.
    """

    compressed: tuple[str, ...]
    held: bool
    sparsity: float
    model_sparsity: float
    before: float | None = None
    after: float | None = None


def compressed_copy(model: nn.Module, at: str, *, dense_ends: bool) -> tuple[nn.Module, list[str]]:
    """Returns a compressed copy of a model, and the names of its compressed weights.

    Raises:
        ValueError: if the operator does more than set weights to zero: training would undo it.
    """
    small = copy.deepcopy(model)
    weights = compressible_weights(small, dense_ends=dense_ends)
    if at == DENSE:
        return small, list(weights)
    masks = compress_(small, at, weights=weights)
    original = dict(model.named_parameters())
    rounded = masks is None or any(
        not torch.equal(weights[name], original[name].masked_fill(mask.logical_not(), 0))
        for name, mask in masks.items()
    )
    if rounded:
        raise ValueError(
            f"{at} changes weights other than to zero, and training on would undo that; allowed: "
            f"operators that only set weights to zero, such as global:0.9 or nm:2:4, and {DENSE!r}"
        )
    return small, list(weights)


def begin_at(
    small: nn.Module,
    names: list[str],
    at: str,
    *,
    recipe: Recipe,
    data: DataSet | PictureSet,
    device: torch.device,
    seed: int,
    new_head: bool,
) -> tuple[nn.Module, Beginning]:
    """Gives a compressed model its head, tunes its batch norm, and measures it.

    Args:
        small: what `compressed_copy` returned, on the CPU; it becomes the start.
        names: of its compressed weights.
        at: what it was compressed by.
        recipe: for training on.
        data: to calibrate and test on.
        device: of all that is computed.
        seed: of a new head and of the calibration.
        new_head: whether to put a fresh last layer of the right size there.
    """
    if new_head:
        names = [name for name in names if name not in _replace_head_(small, data, seed)]
    small = place(small, device)
    before = after = None
    if not new_head:
        before = after = accuracy_on_test(small, recipe, data, device=device)
    if at != DENSE:
        _tune_(small, recipe, data, device=device, seed=seed)
        if not new_head:
            after = accuracy_on_test(small, recipe, data, device=device)
    weights = dict(small.named_parameters())
    return small, Beginning(
        compressed=tuple(names),
        held=at != DENSE,
        sparsity=sparsity({name: weights[name] for name in names}),
        model_sparsity=sparsity(weights),
        before=before,
        after=after,
    )


def zeros_of(model: nn.Module, beginning: Beginning) -> dict[str, torch.Tensor] | None:
    """Returns the masks that a model starts with; None where none are held."""
    weights = dict(model.named_parameters())
    if not beginning.held:
        return None
    return masks_of({name: weights[name] for name in beginning.compressed})


def _replace_head_(model: nn.Module, data: DataSet | PictureSet, seed: int) -> set[str]:
    """Puts a head of the seed on a model that is on the CPU; returns what belongs to it."""
    earlier = dict(model.named_parameters())
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        replace_head_(model, len(data.classes))
    return {name for name, value in model.named_parameters() if value is not earlier.get(name)}


def _tune_(
    model: nn.Module,
    recipe: Recipe,
    data: DataSet | PictureSet,
    *,
    device: torch.device,
    seed: int,
) -> None:
    batches = calibration_batches(
        data.train,
        recipe.compress.calibration_samples,
        recipe.train.batch_size,
        augment=recipe.data.augment,
        mean=data.mean,
        std=data.std,
        device=device,
        seed=mixed(seed, 0),  # as one-shot compression has it, so that the numbers agree
        image_size=recipe.data.image_size,
    )
    with autocast(device, recipe.train.precision):
        tune_batchnorm_(model, batches)
