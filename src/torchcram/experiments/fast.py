"""Training steps that the host does not hold up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchcram import CrAM
from torchcram.experiments.data import ResidentBatches
from torchcram.experiments.step import Batches, EagerStep, Step, train_on
from torchcram.optim.graphs import GraphedStep

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.experiments.recipe import TrainConfig


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    config: TrainConfig,
    device: torch.device,
    *,
    compiled: bool = False,
) -> Step:
    """Returns the fastest way to take steps: as CUDA graphs where that is possible.

    It is with images that live on the GPU, unless an operator is a range.

    Args:
        model: on `device`.
        optimizer: of its parameters, `CrAM` or plain.
        batches: to train on.
        config: precision and label smoothing.
        device: of all that is computed.
        compiled: let torch.compile fuse what graphs are captured of; takes about a minute.
    """
    ranges = isinstance(optimizer, CrAM) and any(one.is_range for one in optimizer.operators)
    if device.type == "cuda" and isinstance(batches, ResidentBatches) and not ranges:
        return GraphStep(model, optimizer, batches, config, device, compiled=compiled)
    return EagerStep(model, optimizer, batches, config, device)


class GraphStep:
    """Takes steps that run on the GPU as a whole: batch, augmentation, all passes and the update.

    Args:
        model: on `device`.
        optimizer: of its parameters, `CrAM` or plain, fused.
        batches: to train on, on `device`.
        config: precision and label smoothing.
        device: a GPU.
        compiled: whether torch.compile fuses the passes first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: ResidentBatches,
        config: TrainConfig,
        device: torch.device,
        *,
        compiled: bool = False,
    ) -> None:
        model.train()
        # what is compiled shares its parameters and buffers with the model
        self._model = torch.compile(model, dynamic=False) if compiled else model
        self._optimizer = optimizer
        self._batches = batches
        self._config = config
        self._device = device
        self._number = torch.zeros((), dtype=torch.int64, device=device)  # of the next batch
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # at w, at w~; how many
        with _tuned_convolutions():
            self._take = GraphedStep(model, optimizer, self._step)

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch."""
        self._batches.start_epoch(epoch)
        self._number.zero_()
        self._sums.zero_()

    def run(self) -> None:
        """Takes a step on the next batch."""
        self._take()

    def losses(self) -> tuple[float, float | None]:
        """Returns the mean losses of the epoch so far."""
        self._take.check()
        dense, compressed, steps, passes = self._sums.tolist()
        if not steps:
            raise ValueError("there are no losses yet: no step was taken in this epoch")
        return dense / steps, compressed / passes if passes else None

    def _step(self) -> None:
        at_w, at_compressed = train_on(
            self._batches.batch(self._number), self._model, self._optimizer, config=self._config
        )
        self._sums[0] += at_w
        self._sums[2] += 1
        if at_compressed is not None:
            self._sums[1] += at_compressed
            self._sums[3] += 1
        self._number.add_(1).remainder_(len(self._batches))


@contextmanager
def _tuned_convolutions() -> Iterator[None]:
    """Lets cuDNN try its algorithms, once for all steps to come."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
