"""The compressed model that fine-tuning and transfer start from."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch

from torchcram import compress_
from torchcram.experiments.data.text.datasets import TextSet
from torchcram.experiments.evaluation.pruning import looks_at_data, pruned
from torchcram.experiments.recipe.overrides import DENSE
from torchcram.experiments.training.build import place, target_weights
from torchcram.pruners import Pruner, parse_pruner

if TYPE_CHECKING:
    from torch import nn

    from torchcram import Operator
    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.training.trainer import Trained


def small_model(
    source: Trained,
    at: str,
    *,
    recipe: Recipe,
    data: AnyData,
    device: torch.device,
    seed: int,
    new_head: bool,
) -> nn.Module:
    """Returns a compressed copy of a trained model, on the CPU.

    Args:
        source: what to compress, by its own recipe.
        at: an operator as text, or "dense".
        recipe: for training on; what its early stopping holds out no pruner sees.
        data: that a pruner looks at.
        device: that a pruner computes on.
        seed: of the batches that it looks at.
        new_head: whether the model gets one, for other data.

    Raises:
        ValueError: if training would undo what the operator does, or the data is not what the model
            was trained on where a pruner needs that.
    """
    if at == DENSE:
        return copy.deepcopy(source.model)
    operator = parse_pruner(at)
    if not looks_at_data(operator):
        return _compressed(source.model, operator, source.recipe)
    if not isinstance(operator, Pruner):
        raise _undone(operator)
    if new_head:
        raise ValueError(
            f"{at} looks at the data that the model was trained on, not at {data.name!r}; allowed: "
            f"operators such as global:0.9, and {DENSE!r}"
        )
    stop = recipe.train.early_stopping
    if stop is not None and isinstance(data, TextSet):
        data = data.hold_out(stop.held_out)
    model = place(source.model, device)
    small, _ = pruned(model, operator, source.recipe, data=data, device=device, seed=seed)
    return small.cpu()


def _compressed(model: nn.Module, operator: Operator, recipe: Recipe) -> nn.Module:
    small = copy.deepcopy(model)
    weights = target_weights(recipe, small)
    masks = compress_(small, operator, weights=weights)
    original = dict(model.named_parameters())
    if masks is None or any(
        not torch.equal(weights[name], original[name].masked_fill(mask.logical_not(), 0))
        for name, mask in masks.items()
    ):
        raise _undone(operator)
    return small


def _undone(operator: Operator) -> ValueError:
    return ValueError(
        f"{operator} changes weights other than to zero, and training on would undo that; allowed: "
        "operators that only set weights to zero, such as global:0.9 or nm:2:4, pruners, and "
        f"{DENSE!r}"
    )
