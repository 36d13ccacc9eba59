"""Training steps: their interface, the eager implementation and the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.parallel import DistributedDataParallel

from torchcram.batches import micro_batches, split_batch
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

CountTargets = Callable[[Tensor], "int | Tensor"]
"""Function that returns the number of targets in labels, over which a loss is the mean."""


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
        count_targets: Function that counts what `loss` is the mean over, given labels.
    """

    loss: Loss = cross_entropy
    class_dim: int = 1
    shares: Shares = WHOLE_BATCH
    teacher: nn.Module | None = None
    count_targets: CountTargets = len


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
    shares = objective.shares

    def closure_on(part: tuple[Tensor, Tensor]) -> Callable[[], Tensor]:
        pieces = _weighted(micro_batches(part, config.accumulation), objective)
        # the outputs of the teacher serve all passes, unless the batch is too large for memory
        kept = _ask_teacher(part[0], config, objective) if len(pieces) == 1 else None

        def closure() -> Tensor:
            optimizer.zero_grad()
            values = []
            for number, (inputs, labels, weights) in enumerate(pieces, 1):
                taught = _ask_teacher(inputs, config, objective) if kept is None else kept
                with _synchronized(model, now=number == len(pieces)):
                    with autocast(inputs.device, config.precision):
                        value = loss_of(  # holds no scores of the micro-batch before
                            model(inputs), labels, config, taught, objective, weights
                        )
                    value.backward()
                values.append(value.detach())
            losses.append(values[0] if len(values) == 1 else torch.stack(values).sum())
            return losses[-1]

        return closure

    parts = (batch,) if shares == WHOLE_BATCH else split_batch(batch, *shares)
    step: Callable[..., object] = optimizer.step  # the loss may stay a tensor
    step(*map(closure_on, parts))
    at_w, *at_compressed = losses
    return at_w, at_compressed[-1] if at_compressed else None  # C-SAM goes to C(w) before


class LossWeights(NamedTuple):
    """Weights of the losses of a micro-batch, by which they add up to those of the whole pass.

    Attributes:
        targets: Share of the targets of the pass, the weight of the task's loss.
        samples: Share of the samples of the pass, the weight of the distillation loss.
    """

    targets: float | Tensor
    samples: float


def _weighted(
    pieces: list[tuple[Tensor, Tensor]], objective: Objective
) -> list[tuple[Tensor, Tensor, LossWeights | None]]:
    """Returns micro-batches with the weights of their losses; None for a single one."""
    if len(pieces) == 1:
        return [(*pieces[0], None)]
    counts = [objective.count_targets(labels) for _, labels in pieces]
    targets, samples = sum(counts), sum(len(inputs) for inputs, _ in pieces)
    return [
        (inputs, labels, LossWeights(count / targets, len(inputs) / samples))
        for (inputs, labels), count in zip(pieces, counts, strict=True)
    ]


def _ask_teacher(inputs: Tensor, config: TrainConfig, objective: Objective) -> Tensor | None:
    """Returns the outputs of the teacher, if there is one."""
    if config.distillation is None or objective.teacher is None:
        return None
    with torch.no_grad(), autocast(inputs.device, config.precision):
        scores: Tensor = objective.teacher(inputs)
    return scores


def _synchronized(model: Callable[[Tensor], Tensor], *, now: bool) -> AbstractContextManager[None]:
    """Lets DDP average the gradients now, or keeps it from doing so, in a `with` block."""
    if not now and isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()


def loss_of(
    scores: Tensor,
    labels: Tensor,
    config: TrainConfig,
    teacher_scores: Tensor | None = None,
    objective: Objective = CLASSIFY,
    weights: LossWeights | None = None,
) -> Tensor:
    """Returns the loss of the task, mixed with that of distillation where there is a teacher.

    Args:
        scores: Outputs of the model.
        labels: Labels of the batch.
        config: Label smoothing and distillation.
        teacher_scores: Outputs of the teacher, if there is one.
        objective: Loss of the task, and the dimension of its scores.
        weights: Weights of both losses for a micro-batch; None for a whole batch.
    """
    value = objective.loss(scores, labels, config.label_smoothing)
    if weights is not None:
        value = _without_nan(value * weights.targets, weights.targets)
    if config.distillation is None or teacher_scores is None:
        return value
    weight = config.distillation.weight
    temperature = config.distillation.temperature
    soft = distillation_loss(scores, teacher_scores, temperature, class_dim=objective.class_dim)
    if weights is not None:
        soft = soft * weights.samples
    return (1 - weight) * value + weight * soft


def _without_nan(value: Tensor, share: float | Tensor) -> Tensor:
    """Returns 0 in place of the mean over no targets, where a micro-batch has none."""
    return torch.where(share > 0, value, 0) if isinstance(share, Tensor) else value


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
