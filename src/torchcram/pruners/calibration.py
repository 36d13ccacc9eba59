"""The data that a pruner looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cudnn

from torchcram.messages import list_names
from torchcram.passes import eval_mode, forward
from torchcram.weights import Weights

Loss = Callable[[nn.Module, Any], Tensor]
"""Runs the model on one batch and returns the loss, one number."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Batches for a model, and how it runs on them: in eval mode, so that nothing else changes.

    Attributes:
        model: what is pruned.
        batches: gone through several times, so a list or a loader and no iterator.
        loss: `loss(model, batch)`. None where no gradient is needed: batches are then inputs, or
            tuples that begin with the inputs, or mappings of keyword arguments, and are moved to
            the device of the model.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator) or not isinstance(self.batches, Iterable):
            raise ValueError(
                f"batches is a {type(self.batches).__name__}, but is gone through several times: "
                "allowed are lists, loaders and whatever else begins anew at every iter()"
            )

    @torch.no_grad()
    def run(self) -> None:
        """Runs the model on all batches.

        Raises:
            ValueError: if there is none.
        """
        count = 0
        torch.clear_autocast_cache()  # which may hold the weights as they were before
        with eval_mode(self.model):
            for count, batch in enumerate(self.batches, 1):  # noqa: B007
                if self.loss is None:
                    forward(self.model, batch)
                else:
                    self.loss(self.model, batch)
        if not count:
            raise ValueError("pruning needs at least one batch to look at, and got none")

    def differentiate(
        self, weights: Weights, count: int, use: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Hands the gradients of `weights` on each of the first `count` batches to `use`.

        A weight that a batch does not reach is left out of that one. `.grad` is not touched.

        Raises:
            ValueError: if there are fewer batches, or a weight is reached by none of them.
        """
        if self.loss is None:
            raise ValueError("gradients need a loss: loss(model, batch) -> Tensor, and got None")
        done = 0
        reached: set[str] = set()
        torch.clear_autocast_cache()
        with eval_mode(self.model), _requiring_gradients(weights), _differentiable(self.model):
            for batch in islice(self.batches, count):
                found = self._gradients(self.loss, weights, batch)
                reached.update(found)
                done += 1
                use(found)
        if done < count:
            raise ValueError(
                f"{count} gradients need as many batches, and there are {done}: give more batches "
                "(smaller ones), or ask for fewer gradients"
            )
        if missed := [name for name in weights if name not in reached]:
            raise ValueError(f"no gradient reaches, on any batch: {list_names(missed)}")

    def _gradients(self, loss: Loss, weights: Weights, batch: object) -> dict[str, Tensor]:
        with torch.enable_grad():
            value = loss(self.model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError("loss(model, batch) must return one number with a gradient")
            found = torch.autograd.grad(value.sum(), list(weights.values()), allow_unused=True)
        return {
            name: gradient
            for name, gradient in zip(weights, found, strict=True)
            if gradient is not None
        }


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Leaves cuDNN aside where there are recurrent layers: it has no gradients in eval mode."""
    before = cudnn.enabled
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    try:
        cudnn.enabled = False
        yield
    finally:
        cudnn.enabled = before


@contextmanager
def _requiring_gradients(weights: Weights) -> Iterator[None]:
    frozen = [weight for weight in weights.values() if not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
