"""Training steps captured as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from torchcram import CrAM
from torchcram.experiments.data.images import ResidentBatches
from torchcram.experiments.data.text.batches import TextBatches
from torchcram.experiments.recipe.torch_names import is_capturable
from torchcram.experiments.training.steps import EagerStep, Loss, Step, cross_entropy
from torchcram.messages import warn_caller
from torchcram.optim.graphs import GraphedStep

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.experiments.data.text.batches import TextBatches
    from torchcram.experiments.recipe import TrainConfig
    from torchcram.experiments.tasks import Batches


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
        loss: Loss of the task.
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
        loss: Loss = cross_entropy,
    ) -> None:
        super().__init__(
            model.train(), optimizer, batches, config, device, teacher=teacher, loss=loss
        )
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


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    config: TrainConfig,
    device: torch.device,
    *,
    teacher: nn.Module | None = None,
    loss: Loss = cross_entropy,
    compiled: bool = False,
) -> Step:
    """Returns the fastest way to take steps: as CUDA graphs where that is possible.

    It is with images or texts that live on the GPU, unless an operator is a range, several
    processes train together, or the base optimizer is another than SGD, Adam and AdamW, of which a
    warning tells.

    Args:
        model: on `device`.
        optimizer: of its parameters, `CrAM` or plain.
        batches: to train on.
        config: precision, label smoothing and distillation.
        device: of all that is computed.
        teacher: on `device`, in eval mode, whose scores count too where `config` says so.
        loss: Loss of the task.
        compiled: let torch.compile fuse what graphs are captured of; takes about a minute. Not with
            texts, whose batches have many lengths.
    """
    ranges = isinstance(optimizer, CrAM) and any(one.is_range for one in optimizer.operators)
    alone = device.type == "cuda" and not isinstance(model, DistributedDataParallel)
    images = alone and isinstance(batches, ResidentBatches) and not ranges
    texts = alone and isinstance(batches, TextBatches) and can_be_captured(optimizer)
    if (images or texts) and not is_capturable(optimizer):
        _warn_eager(type(getattr(optimizer, "base", optimizer)).__name__)
    elif images and isinstance(batches, ResidentBatches):
        return GraphStep(
            model,
            optimizer,
            batches,
            config,
            device,
            teacher=teacher,
            loss=loss,
            compiled=compiled,
        )
    elif texts and isinstance(batches, TextBatches):
        return TextGraphStep(model, optimizer, batches, config, device, teacher=teacher, loss=loss)
    return EagerStep(model, optimizer, batches, config, device, teacher=teacher, loss=loss)


@functools.cache
def _warn_eager(name: str) -> None:
    warn_caller(
        f"steps of {name} are not captured as CUDA graphs and run eagerly; those of SGD without "
        "dampening, Adam and AdamW are captured"
    )


class GraphStep(EagerStep):
    """Takes steps that run on the GPU as a whole: batch, augmentation, all passes and the update.

    Args:
        model: on `device`.
        optimizer: of its parameters, `CrAM` or plain, fused.
        batches: to train on, on `device`.
        config: precision, label smoothing and distillation.
        device: a GPU.
        teacher: as `EagerStep` has it.
        loss: Loss of the task.
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
        teacher: nn.Module | None = None,
        loss: Loss = cross_entropy,
        compiled: bool = False,
    ) -> None:
        super().__init__(
            model.train(), optimizer, batches, config, device, teacher=teacher, loss=loss
        )
        if compiled:
            # what is compiled shares its parameters and buffers with the model
            self._model = torch.compile(model, dynamic=False)
        self._resident = batches
        self._number = torch.zeros((), dtype=torch.int64, device=device)  # of the next batch
        with _tuned_convolutions():
            self._take = GraphedStep(model, optimizer, self._step)

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch."""
        self._resident.start_epoch(epoch)
        self._number.zero_()
        self._sums.zero_()

    def run(self) -> None:
        """Takes a step on the next batch."""
        self._take()

    def losses(self) -> tuple[float, float | None]:
        """Returns the mean losses of the epoch so far."""
        self._take.check()
        return super().losses()

    def _step(self) -> None:
        self._train_on(self._resident.batch(self._number))
        self._number.add_(1).remainder_(len(self._resident))


@contextmanager
def _tuned_convolutions() -> Iterator[None]:
    """Lets cuDNN try its algorithms, once for all steps to come."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
