"""Targets that look at training batches before they compress: pruners, by a recipe."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.seeds import mixed
from torchcram.experiments.training.build import build_batches, target_weights
from torchcram.experiments.training.steps import autocast, loss_of
from torchcram.pruners import Pruner, prune_

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram import Operator
    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.training.steps import Batches


def looks_at_data(operator: Operator) -> bool:
    """Says whether there is a pruner in an operator."""
    return any(isinstance(part, Pruner) for part in operator.parts)


def pruned(
    model: nn.Module,
    operator: Operator,
    recipe: Recipe,
    *,
    data: AnyData,
    device: torch.device,
    seed: int,
    ranks: Ranks = SINGLE,
) -> tuple[nn.Module, float]:
    """Returns a copy of a model that a pruner has compressed, and the seconds that it took.

    It looks at training batches as the recipe has them, augmented, with the loss of the recipe: for
    `Obs`, and others with an option `gradients`, one for each of them, drawn from as many epochs as
    that takes, and for the rest as many as `compress.calibration_samples` needs.

    Args:
        model: on `device`; it stays as it is.
        operator: with a pruner in it.
        recipe: its sections `compress`, `data` and `train` count.
        data: whose training split is looked at.
        device: of all that is computed.
        seed: of the choice of batches.
        ranks: Processes that share the work; rank 0 writes the files.
    """
    small = copy.deepcopy(model)
    weights = target_weights(recipe, small)
    begin = time.perf_counter()

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        with autocast(device, recipe.train.precision):
            return loss_of(net(inputs), labels, recipe.train)

    def prune() -> dict[str, Tensor]:
        source = build_batches(recipe, data, train=True, device=device, seed=mixed(seed, "pruning"))
        size = min(recipe.train.batch_size, len(data.train))
        count = _batches_for(operator, math.ceil(recipe.compress.calibration_samples / size))
        prune_(small, operator, _Some(source, count), loss=loss, weights=weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return {name: weight.detach().cpu() for name, weight in weights.items()}

    found = ranks.broadcast_from_rank0(prune)
    if not ranks.is_first:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(found[name])
    return small, time.perf_counter() - begin


def _batches_for(operator: Operator, few: int) -> int:
    return max(getattr(part, "gradients", few) for part in operator.parts)


class _Some:
    """The first so many batches, the same ones at every pass; further epochs where one has fewer.

    Args:
        batches: to take them from.
        count: how many.
    """

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left, epoch = self._count, 0
        while left:
            for batch in self._batches.epoch(epoch):
                yield batch
                left -= 1
                if not left:
                    return
            epoch += 1
