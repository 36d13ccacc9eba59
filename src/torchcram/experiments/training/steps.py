"""Training steps: their interface, the eager implementation and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from torchcram.batches import split_batch
from torchcram.experiments.tasks import autocast

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchcram.experiments.recipe import TrainConfig
    from torchcram.experiments.tasks import Batches


Shares = tuple[float, float]
"""Shares of a batch that the passes at w and at w~ take."""

WHOLE_BATCH: Shares = (1.0, 1.0)
Loss = Callable[[Tensor, Tensor, float], Tensor]
"""Function that returns the loss, given outputs, labels and label smoothing."""


def cross_entropy(scores: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy of class scores, (n, classes)."""
    return F.cross_entropy(scores, labels, label_smoothing=smoothing)


@dataclass(frozen=True, eq=False)
class Objective:
    """What steps minimize, beside the settings of the recipe.

    Attributes:
        loss: Loss of the task: a function of outputs, labels and label smoothing.
        class_dim: Dimension of the outputs that the scores of one prediction are along.
        shares: Shares of every batch that the passes at w and at w~ take.
        teacher: Model in eval mode to learn from, where the recipe has distillation.
    """

    loss: Loss = cross_entropy
    class_dim: int = 1
    shares: Shares = WHOLE_BATCH
    teacher: nn.Module | None = None


CLASSIFY = Objective()
"""Cross-entropy of class scores, on the whole batch in both passes."""


class Step(Protocol):
    """Takes training steps, with the learning rate that the optimizer's groups have.

    The trainer calls `start_epoch`, then `run` for every batch of the epoch, then `losses`.
    """

    def start_epoch(self, epoch: int) -> None:
        """Begins an epoch, numbered from 0, at its first batch, and resets the mean losses."""

    def run(self) -> None:
        """Takes a step on the next batch of the epoch; does not wait for the device."""

    def losses(self) -> tuple[float, float | None]:
        """Waits for the device; returns the mean losses of the epoch so far, at w and at w~.

        The second is None if no step went to w~.
        """


class MakeStep(Protocol):
    """Makes a `Step`, after the model and the optimizer have loaded the state to continue from."""

    def __call__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        config: TrainConfig,
        device: torch.device,
        *,
        objective: Objective = CLASSIFY,
    ) -> Step:
        """Returns a `Step`; the arguments are those of `EagerStep`."""


class EagerStep:
    """Takes steps one kernel at a time, on any device, with any model, optimizer and batches.

    Args:
        model: Model on `device`.
        optimizer: Optimizer of its parameters, `CrAM` or plain.
        batches: Batches to train on.
        config: Precision, label smoothing and distillation.
        device: Device that everything is computed on.
        objective: Loss, shares of a batch, and teacher on `device`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        batches: Batches,
        config: TrainConfig,
        device: torch.device,
        *,
        objective: Objective = CLASSIFY,
    ) -> None:
        self._model: Callable[[Tensor], Tensor] = model
        self._optimizer = optimizer
        self._batches = batches
        self._config, self._objective = config, objective
        self._coming: Iterator[tuple[Tensor, Tensor]] = iter(())
        # sums of the losses at w and at w~, and the number of each
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)

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
            raise ValueError("there are no losses: no step was taken in this epoch")
        return dense / steps, compressed / passes if passes else None

    def _train_on(self, batch: tuple[Tensor, Tensor]) -> None:
        at_w, at_compressed = train_on(
            batch, self._model, self._optimizer, config=self._config, objective=self._objective
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
    objective: Objective = CLASSIFY,
) -> tuple[Tensor, Tensor | None]:
    """Takes a step on a batch; returns the losses at w and, where the step went there, at w~."""
    losses: list[Tensor] = []
    teacher, shares = objective.teacher, objective.shares

    def closure_on(part: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
        inputs, labels = part
        teacher_scores = None
        if config.distillation is not None and teacher is not None:
            with torch.no_grad(), autocast(inputs.device, config.precision):
                teacher_scores = teacher(inputs)

        def closure() -> Tensor:
            optimizer.zero_grad()
            with autocast(inputs.device, config.precision):
                value = loss_of(model(inputs), labels, config, teacher_scores, objective=objective)
            value.backward()
            losses.append(value.detach())
            return losses[-1]

        return closure

    parts = (batch,) if shares == WHOLE_BATCH else split_batch(batch, *shares)
    step: Callable[..., object] = optimizer.step  # the loss may stay a tensor
    step(*map(closure_on, parts))
    at_w, *at_compressed = losses
    return at_w, at_compressed[-1] if at_compressed else None  # C-SAM goes to C(w) before


def loss_of(
    scores: Tensor,
    labels: Tensor,
    config: TrainConfig,
    teacher_scores: Tensor | None = None,
    *,
    objective: Objective = CLASSIFY,
) -> Tensor:
    """Returns the loss of the task, mixed with that of distillation where there is a teacher.

    Args:
        scores: Outputs of the model.
        labels: Labels of the batch.
        config: Label smoothing and distillation.
        teacher_scores: Outputs of the teacher, if there is one.
        objective: Loss of the task, and the dimension of its scores.
    """
    value = objective.loss(scores, labels, config.label_smoothing)
    if config.distillation is None or teacher_scores is None:
        return value
    weight = config.distillation.weight
    temperature = config.distillation.temperature
    soft = distillation_loss(scores, teacher_scores, temperature, class_dim=objective.class_dim)
    return (1 - weight) * value + weight * soft


def distillation_loss(
    scores: Tensor, teacher_scores: Tensor, temperature: float, *, class_dim: int = 1
) -> Tensor:
    """Returns temperature^2 KL(teacher || model), the mean over a batch.

    The factor keeps the size of gradients independent of the temperature. Padding, where scores
    are -inf, is left out.

    Args:
        scores: Scores of the model, (n, classes), (n, t, 2) for first and last tokens, or
            (n, t, vocabulary) for next tokens; the mean is taken over all predictions.
        teacher_scores: Scores of the teacher, of the same shape.
        temperature: Temperature that the scores of both are divided by.
        class_dim: Dimension that the scores of one prediction are along.
    """
    log = (scores.float() / temperature).log_softmax(class_dim)
    target = (teacher_scores.float() / temperature).log_softmax(class_dim)
    divergence = torch.where(target.isneginf(), 0, target.exp() * (target - log))
    return temperature**2 * divergence.sum(class_dim).mean()
