"""Optimizers and learning-rate schedulers of torch, by the names of their classes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

_OTHER_OPTIMIZERS = ("Optimizer", "LBFGS", "SparseAdam")  # base; several closures; sparse only
_OTHER_SCHEDULERS = (  # base classes, and those that need functions, schedulers or a metric
    *("LRScheduler", "_LRScheduler", "LambdaLR", "MultiplicativeLR"),
    *("SequentialLR", "ChainedScheduler", "ReduceLROnPlateau"),
)
_NOT_ARGUMENTS = {  # set by other keys of the recipe, or by the trainer
    *("params", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable"),
    *("optimizer", "last_epoch", "verbose", "scale_fn"),
    *("cycle_momentum", "base_momentum", "max_momentum"),  # the learning rate alone is scheduled
}
_FUSED = (SGD, Adam, AdamW)

OPTIMIZERS: dict[str, type[Optimizer]] = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and name not in _OTHER_OPTIMIZERS
}
"""Classes of torch.optim that take a step from one gradient, by name."""

SCHEDULERS: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: kind
    for name, kind in vars(lr_scheduler).items()
    if isinstance(kind, type)
    and issubclass(kind, lr_scheduler.LRScheduler)
    and name not in _OTHER_SCHEDULERS
}
"""Classes of torch.optim.lr_scheduler whose learning rates depend on the step alone, by name."""


def arguments_of(kind: type) -> list[str]:
    """Returns the names of the arguments that a recipe may give to an optimizer or scheduler."""
    return [name for name in inspect.signature(kind).parameters if name not in _NOT_ARGUMENTS]


def has_weight_decay(name: str) -> bool:
    """Returns whether an optimizer of torch takes a weight decay."""
    return "weight_decay" in inspect.signature(OPTIMIZERS[name]).parameters


def make_optimizer(
    name: str,
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float,
    args: Mapping[str, Any],
) -> Optimizer:
    """Returns an optimizer of torch; SGD, Adam and AdamW are fused on a GPU.

    Args:
        name: One of `OPTIMIZERS`.
        parameters: Parameters to train.
        lr: Learning rate.
        weight_decay: Weight decay; ignored by optimizers that have none.
        args: Other arguments; lists become tuples.
    """
    kind: Any = OPTIMIZERS[name]
    trained = list(parameters)
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in args.items()}
    if has_weight_decay(name):
        options["weight_decay"] = weight_decay
    if kind in _FUSED and trained[0].is_cuda:
        options["fused"] = True
    optimizer: Optimizer = kind(trained, lr=lr, **options)
    return optimizer


def learning_rates(
    name: str, args: Mapping[str, Any], *, lr: float, count: int
) -> tuple[float, ...]:
    """Returns the first `count` learning rates of a scheduler of torch.

    They are computed all at once with an optimizer of a dummy parameter, so that a training that
    is continued has the same rates as one that was never stopped.

    Args:
        name: One of `SCHEDULERS`.
        args: Arguments of the scheduler. The peak `max_lr` is `lr` and `total_steps` is `count`
            where a scheduler needs them and they are not given.
        lr: Learning rate of the optimizer.
        count: Number of learning rates.

    Raises:
        ValueError: If the scheduler refuses an argument, or has fewer learning rates.
    """
    try:
        return _learning_rates(name, json.dumps(args, sort_keys=True), lr, count)
    except Exception as error:
        raise ValueError(f"{name}: {type(error).__name__}: {error}") from error


@lru_cache(maxsize=8)
def _learning_rates(name: str, args: str, lr: float, count: int) -> tuple[float, ...]:
    if not count:  # the training is all warm-up
        return ()
    kind, options = SCHEDULERS[name], json.loads(args)
    accepted = inspect.signature(kind).parameters
    if "cycle_momentum" in accepted:
        options["cycle_momentum"] = False
    if "max_lr" in accepted:
        options.setdefault("max_lr", lr)
    if "total_steps" in accepted and "epochs" not in options:
        options.setdefault("total_steps", count)
    optimizer = SGD([nn.Parameter(torch.zeros(()))], lr=lr)
    scheduler = kind(optimizer, **options)
    optimizer.step()
    rates: list[float] = []
    for number in range(count):
        if number:
            scheduler.step()
        rate = optimizer.param_groups[0]["lr"]
        rates.append(float(rate.item() if isinstance(rate, Tensor) else rate))
    return tuple(rates)
