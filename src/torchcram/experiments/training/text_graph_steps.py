"""Training steps on texts as CUDA graphs, for each length its own."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from torchcram import CrAM
from torchcram.experiments.training.steps import EagerStep
from torchcram.optim.graphs import GraphedStep

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.experiments.data.text.batches import TextBatches
    from torchcram.experiments.recipe import TrainConfig


def can_be_captured(optimizer: Optimizer) -> bool:
    """Whether steps of an optimizer can be graphs of several lengths.

    Masks that are kept from step to step cannot: each length would keep its own.
    """
    if not isinstance(optimizer, CrAM):
        return True
    ranges = any(one.is_range for one in optimizer.operators)
    return not ranges and optimizer._sampler.mask_interval == 1


class TextGraphStep(EagerStep):
    """Takes steps that run on the GPU as a whole; the host only says which sequences, how long.

    Args:
        model: on `device`.
        optimizer: of its parameters, `CrAM` or plain, fused; one that `can_be_captured`.
        batches: to train on, on `device`.
        config: precision, label smoothing and distillation.
        device: a GPU.
        teacher: as `EagerStep` has it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: TextBatches,
        config: TrainConfig,
        device: torch.device,
        *,
        teacher: nn.Module | None = None,
    ) -> None:
        super().__init__(model.train(), optimizer, batches, config, device, teacher=teacher)
        self._texts, self._number = batches, 0
        self._chosen = batches.places(0).clone()  # where every graph finds its sequences
        self._takes: dict[int, GraphedStep] = {}
        # the longest first: what it needs of memory is enough for the others
        for length, places in sorted(batches.of_every_length().items(), reverse=True):
            self._chosen.copy_(places)
            self._takes[length] = GraphedStep(model, optimizer, partial(self._step, length))

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch."""
        self._texts.start_epoch(epoch)
        self._number = 0
        self._sums.zero_()

    def run(self) -> None:
        """Takes a step on the next batch."""
        self._chosen.copy_(self._texts.places(self._number))
        self._takes[self._texts.lengths[self._number]]()
        self._number += 1

    def losses(self) -> tuple[float, float | None]:
        """Returns the mean losses of the epoch so far."""
        for take in self._takes.values():
            take.check()
        return super().losses()

    def _step(self, length: int) -> None:
        self._train_on(self._texts.at(self._chosen, length))
