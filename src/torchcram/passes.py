"""Running a model: eval mode for a while, and forward passes on batches of any kind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import torch
    from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts `model` into eval mode for a `with` block, and restores the mode of every module."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def forward(model: nn.Module, batch: object) -> None:
    """Runs `model` on a batch, which is moved to the device of the model.

    Args:
        model: Model with at least one parameter or buffer.
        batch: Inputs, a tuple or list that begins with them, or a mapping of keyword arguments.
    """
    device = next(chain(model.parameters(), model.buffers())).device
    if isinstance(batch, Mapping):
        model(**{key: _move(value, device) for key, value in batch.items()})
    else:
        inputs = batch[0] if isinstance(batch, (tuple, list)) else batch
        model(_move(inputs, device))


def _move(value: object, device: torch.device) -> object:
    return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
