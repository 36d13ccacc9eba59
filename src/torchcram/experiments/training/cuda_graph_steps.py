"""Training steps captured as CUDA graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.nn.parallel import DistributedDataParallel

from torchcram import CrAM
from torchcram.experiments.training.steps import CLASSIFY, EagerStep, Objective, Step
from torchcram.messages import warn_caller
from torchcram.optim.concurrent import default_concurrency
from torchcram.optim.graphs import StepGraphs, is_capturable
from torchcram.sharding import has_shards

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.experiments.recipe import TrainConfig
    from torchcram.experiments.tasks import Batches


@runtime_checkable
class CapturableBatches(Protocol):
    """Training batches that a CUDA graph can read: they live on the GPU as a whole.

    There is a graph for every shape that batches have, known by a key. Before a graph is replayed,
    the host calls `stage_next`; in the graph, `staged_batch` reads from memory that never moves.
    """

    has_one_shape: bool
    """Whether all batches have the same shape, so that there is a single graph."""

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the inputs and labels of an epoch, for steps that are not captured."""

    def start_epoch(self, epoch: int) -> None:
        """Draws the batches of an epoch, numbered from 0; its first batch is the next one."""

    def stage_each_shape(self) -> Iterator[int]:
        """Stages a batch of every shape in turn, the largest first; yields its key."""

    def stage_next(self) -> int:
        """Stages the next batch of the epoch without waiting for the GPU; returns its key."""

    def staged_batch(self, key: int) -> tuple[Tensor, Tensor]:
        """Returns inputs and labels of the staged batch; runs on the GPU alone.

        Args:
            key: Key of the batch, on which the shape depends.
        """


def can_be_captured(optimizer: Optimizer, *, has_one_shape: bool = False) -> bool:
    """Whether steps of an optimizer can be captured, as far as its operators are concerned.

    An operator that is a range cannot. Masks that are kept from step to step cannot with several
    graphs, of which each would keep its own.

    Args:
        optimizer: `CrAM`, or a plain optimizer.
        has_one_shape: Whether all batches have the same shape, so that there is a single graph.
    """
    if not isinstance(optimizer, CrAM):
        return getattr(optimizer, "capturable_steps", True)
    has_ranges = any(operator.is_range for operator in optimizer.operators)
    return not has_ranges and (has_one_shape or optimizer._sampler.mask_interval == 1)


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Batches,
    config: TrainConfig,
    device: torch.device,
    *,
    objective: Objective = CLASSIFY,
    compiled: bool = False,
) -> Step:
    """Returns a `GraphStep` where steps can be captured as CUDA graphs, else an `EagerStep`.

    Steps are captured on a GPU if the batches are `CapturableBatches`, a single process trains and
    no operator is a range. A base optimizer other than SGD, Adam and AdamW is not captured either,
    which a warning says.

    Args:
        model: Model on `device`.
        optimizer: Optimizer of its parameters, `CrAM` or plain.
        batches: Batches to train on.
        config: Precision, label smoothing and distillation.
        device: Device that everything is computed on.
        objective: Loss, shares of a batch, and teacher on `device`.
        compiled: Whether torch.compile fuses the passes before they are captured, which takes about
            a minute.
    """
    several = isinstance(model, DistributedDataParallel) or has_shards(model)
    if (
        device.type == "cuda"
        and not several
        and isinstance(batches, CapturableBatches)
        and can_be_captured(optimizer, has_one_shape=batches.has_one_shape)
    ):
        if is_capturable(optimizer):
            return GraphStep(
                model,
                optimizer,
                batches,
                config,
                device,
                objective=objective,
                compiled=compiled,
            )
        _warn_eager(type(getattr(optimizer, "base", optimizer)).__name__)
    return EagerStep(model, optimizer, batches, config, device, objective=objective)


@functools.cache
def _warn_eager(name: str) -> None:
    warn_caller(
        f"steps of {name} are not captured as CUDA graphs and run eagerly; those of SGD without "
        "dampening, Adam and AdamW are captured"
    )


class GraphStep(EagerStep):
    """Takes steps that run on the GPU as a whole: batch, augmentation, all passes and the update.

    Args:
        model: Model on `device`.
        optimizer: Optimizer of its parameters, `CrAM` or plain, fused; one that `can_be_captured`.
        batches: Batches to train on, on `device`.
        config: Precision, label smoothing and distillation.
        device: GPU that everything is computed on.
        objective: Loss, shares of a batch, and teacher on `device`.
        compiled: Whether torch.compile fuses the passes first.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: CapturableBatches,
        config: TrainConfig,
        device: torch.device,
        *,
        objective: Objective = CLASSIFY,
        compiled: bool = False,
    ) -> None:
        super().__init__(model.train(), optimizer, batches, config, device, objective=objective)
        if compiled:
            # what is compiled shares its parameters and buffers with the model; batches of several
            # lengths share one compilation, too
            self._model = torch.compile(model, dynamic=not batches.has_one_shape)
        self._staged = batches
        self._graphs: dict[int, StepGraphs] = {}
        concurrent = default_concurrency(*objective.shares)
        with _tuned_convolutions() if batches.has_one_shape else nullcontext():
            # the largest shape first: the memory that it needs is enough for the others
            for key in batches.stage_each_shape():
                self._graphs[key] = StepGraphs(
                    model, optimizer, partial(self._step, key), concurrent_passes=concurrent
                )

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch."""
        self._staged.start_epoch(epoch)
        self._sums.zero_()

    def run(self) -> None:
        """Takes a step on the next batch."""
        self._graphs[self._staged.stage_next()]()

    def losses(self) -> tuple[float, float | None]:
        """Returns the mean losses of the epoch so far."""
        for graph in self._graphs.values():
            graph.check()
        return super().losses()

    def _step(self, key: int) -> None:
        self._train_on(self._staged.staged_batch(key))


@contextmanager
def _tuned_convolutions() -> Iterator[None]:
    """Lets cuDNN try its algorithms during capture and keep the fastest in the graph."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
