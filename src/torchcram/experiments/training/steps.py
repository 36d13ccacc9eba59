"""One training step on a batch, without waiting for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from torchcram.experiments.tasks import autocast

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchcram.experiments.recipe import TrainConfig
    from torchcram.experiments.tasks import Batches


Loss = Callable[[Tensor, Tensor, float], Tensor]
"""Returns the loss of outputs, labels and label smoothing."""


def cross_entropy(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy of class scores, (n, classes)."""
    return F.cross_entropy(scores, labels, label_smoothing=smoothing)


class Step(Protocol):
    """A way to take training steps; the learning rate is the one that the optimizer's groups hold.

    `start_epoch`, then `run` for every batch of the epoch, then `losses`.
    """

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch, numbered from 0: its first batch comes next, the means begin anew."""

    def run(self) -> None:
        """Takes a step on the next batch of the epoch; does not wait for the device."""

    def losses(self) -> tuple[float, float | None]:
        """Waits for the device; returns the mean losses of the epoch so far, at w and at w~.

        None in place of the second where no step went to a w~.
        """


class MakeStep(Protocol):
    """Makes a `Step`; called once the model and the optimizer hold the state to continue from."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        config: TrainConfig,
        device: torch.device,
        *,
        teacher: nn.Module | None = None,
        loss: Loss = cross_entropy,
    ) -> Step:
        """Returns a way to take steps, as `EagerStep` has it."""


class EagerStep:
    """Takes steps one kernel at a time, on any device, with any model, optimizer and batches.

    Args:
        model: on `device`.
        optimizer: of its parameters, `CrAM` or plain.
        batches: to train on.
        config: precision, label smoothing and distillation.
        device: of all that is computed.
        teacher: on `device`, in eval mode, whose scores count too where `config` says so.
        loss: Loss of the task: a function of outputs, labels and label smoothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        config: TrainConfig,
        device: torch.device,
        *,
        teacher: nn.Module | None = None,
        loss: Loss = cross_entropy,
    ) -> None:
        self._loss = loss
        self._model: Callable[[Tensor], Tensor] = model
        self._optimizer = optimizer
        self._batches = batches
        self._config = config
        self._teacher = teacher
        self._coming: Iterator[tuple[Tensor, Tensor]] = iter(())
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)  # at w, at w~; how many

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch."""
        self._coming = iter(self._batches.epoch(epoch))
        self._sums.zero_()

    def run(self) -> None:
        """Takes a step on the next batch."""
        self._train_on(next(self._coming))

    def losses(self) -> tuple[float, float | None]:
        """Returns the mean losses of the epoch so far."""
        dense, compressed, steps, passes = self._sums.tolist()
        if not steps:
            raise ValueError("there are no losses yet: no step was taken in this epoch")
        return dense / steps, compressed / passes if passes else None

    def _train_on(self, batch: tuple[Tensor, Tensor]) -> None:
        at_w, at_compressed = train_on(
            batch,
            self._model,
            self._optimizer,
            config=self._config,
            teacher=self._teacher,
            loss=self._loss,
        )
        self._sums[0] += at_w
        self._sums[2] += 1
        if at_compressed is not None:
            self._sums[1] += at_compressed
            self._sums[3] += 1


def train_on(
    batch: tuple[Tensor, Tensor],
    model: Callable[[Tensor], Tensor],
    optimizer: Optimizer,
    *,
    config: TrainConfig,
    teacher: nn.Module | None = None,
    loss: Loss = cross_entropy,
) -> tuple[Tensor, Tensor | None]:
    """Takes a step on a batch; returns the losses at w and, where the step went there, at w~."""
    images, labels = batch
    losses: list[Tensor] = []
    wanted = None
    if config.distillation is not None and teacher is not None:
        with torch.no_grad(), autocast(images.device, config.precision):
            wanted = teacher(images)

    def closure() -> Tensor:
        optimizer.zero_grad()
        with autocast(images.device, config.precision):
            value = loss_of(model(images), labels, config, wanted, loss=loss)
        value.backward()
        losses.append(value.detach())
        return losses[-1]

    optimizer.step(closure)  # type: ignore[arg-type]  # the loss may stay a tensor
    at_w, *at_compressed = losses
    return at_w, at_compressed[-1] if at_compressed else None  # C-SAM goes to C(w) before


def loss_of(
    scores: Tensor,
    labels: Tensor,
    config: TrainConfig,
    wanted: Tensor | None = None,
    *,
    loss: Loss = cross_entropy,
) -> Tensor:
    """Returns the loss of the task, mixed with that of distillation where there is a teacher.

    Args:
        scores: Outputs of the model.
        labels: Labels of the batch.
        config: Label smoothing and distillation.
        wanted: Outputs of the teacher, if there is one.
        loss: Loss of the task.
    """
    value = loss(scores, labels, config.label_smoothing)
    if config.distillation is None or wanted is None:
        return value
    weight = config.distillation.weight
    soft = distillation_loss(scores, wanted, config.distillation.temperature)
    return (1 - weight) * value + weight * soft


def distillation_loss(scores: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of scores from those of another model, the mean over a batch.

    It is multiplied by the square of the temperature, so that gradients keep their size. Padding,
    at -inf, counts for nothing.

    Args:
        scores: (n, classes), or (n, t, 2) of first and last tokens, the mean of both.
        wanted: the same of the other model.
        temperature: of both.
    """
    log = (scores.float() / temperature).log_softmax(dim=1)
    target = (wanted.float() / temperature).log_softmax(dim=1)
    apart = torch.where(target.isneginf(), 0, target.exp() * (target - log))
    return temperature**2 * apart.sum(dim=1).mean()
