"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import Tensor

from torchcram.experiments.recipe.torch_names import SCHEDULERS, learning_rates

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchcram.experiments.recipe import ScheduleConfig


def lr_at(
    step: int, steps_per_epoch: int, config: ScheduleConfig, *, lr: float, epochs: int
) -> float:
    """Returns the learning rate of a step.

    It is lr (step + 1) / W in W warm-up steps, then lr (1 + cos(pi (step - W) / (T - W))) / 2,
    where T is the number of all steps, so that the step after the last one would have 0. The
    schedule "linear" is lr (T - step) / (T - W) after the warm-up, and "constant" stays at lr. A
    scheduler of torch begins after the warm-up and advances after every epoch or step.

    Args:
        step: Number of the step in the whole training, from 0.
        steps_per_epoch: Number of steps in an epoch, at least 1.
        config: Schedule and length of the warm-up.
        lr: Peak learning rate.
        epochs: Number of epochs of the whole training.
    """
    warmup = config.warmup_epochs * steps_per_epoch
    total = epochs * steps_per_epoch
    if step < warmup:
        return lr * (step + 1) / warmup
    if config.name in SCHEDULERS:
        unit = steps_per_epoch if config.interval == "epoch" else 1
        count = max(0, total - warmup) // unit
        rates = learning_rates(config.name, config.args or {}, lr=lr, count=count)
        return rates[(step - warmup) // unit]
    if config.name == "constant":
        return lr
    if config.name == "linear":
        return lr * (total - step) / max(1, total - warmup)
    if config.name != "cosine":
        raise ValueError(
            f"schedule {config.name!r}: allowed are 'cosine', 'linear', 'constant' and the "
            f"schedulers of torch: {', '.join(SCHEDULERS)}"
        )
    return lr * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup))) / 2


def set_lr_(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of every parameter group; a tensor is filled in place.

    A group that a method adds, of gates or scores, keeps its ratio to the others ("lr_ratio").
    """
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_ratio", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # captured graphs read it from this memory
        else:
            group["lr"] = rate
