"""Exponential moving average (EMA) of the weights of a training, for recipes with `train.ema`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if TYPE_CHECKING:
    from torch import Tensor, nn


class WeightAverage(AveragedModel):
    """Averages weights w over the steps of a training, in the copy `module` of the model.

    ::

        a <- w                   after the first step
        a <- d a + (1 - d) w     after every later one, with d = min(decay, (1 + t) / (10 + t))

    t is the number of steps averaged so far. The smaller d at the beginning lets the average forget
    the first weights in time, also in a training that is shorter than 1 / (1 - decay) steps.

    Running statistics of norm layers are averaged in the same way: they belong to the activations
    that all these weights gave, not to those of the last weights alone. All other buffers are
    copied, because an average of counters and tables means nothing, and that of -inf is NaN.

    Args:
        model: Model whose copy holds the average, on the device that it is trained on.
        decay: Largest decay d, between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model)
        self._decay = decay
        self._averaged, self._copied = _tensors(self.module)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Takes the weights after another step into the average.

        Unlike the method of the base class, it does not wait for the device.
        """
        steps = int(self.n_averaged)  # on the CPU
        decay = min(self._decay, (1 + steps) / (10 + steps)) if steps else 0.0
        averaged, copied = _tensors(model)
        get_ema_multi_avg_fn(decay)(self._averaged, averaged, steps)
        if copied:
            torch._foreach_copy_(self._copied, copied)
        self.n_averaged += 1


def _tensors(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the parameters and buffers of a model that are averaged, and those copied."""
    statistics = {
        id(value)
        for layer in model.modules()
        if isinstance(layer, _NormBase)
        for value in (layer.running_mean, layer.running_var)
    }
    averaged: list[Tensor] = list(model.parameters())
    copied: list[Tensor] = []
    for buffer in model.buffers():
        (averaged if id(buffer) in statistics else copied).append(buffer)
    return averaged, copied
