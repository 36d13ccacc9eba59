"""Exponential moving average (EMA) of the weights of a training, for recipes with `train.ema`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

if TYPE_CHECKING:
    from torch import Tensor, nn

    Tensors = tuple[Tensor, ...] | list[Tensor]


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
        super().__init__(model, multi_avg_fn=self._average_, use_buffers=True)
        self._decay = decay
        averaged = {
            id(statistic)
            for layer in self.module.modules()
            if isinstance(layer, _NormBase)
            for statistic in (layer.running_mean, layer.running_var)
        }
        self._copied = [
            name for name, value in self.module.named_buffers() if id(value) not in averaged
        ]

    @torch.no_grad()
    def update_parameters(self, model: nn.Module) -> None:
        """Takes the weights after another step into the average, without waiting for the device."""
        super().update_parameters(model)
        if self._copied:
            ours, theirs = dict(self.module.named_buffers()), dict(model.named_buffers())
            torch._foreach_copy_(
                [ours[name] for name in self._copied], [theirs[name] for name in self._copied]
            )

    def _average_(self, averages: Tensors, values: Tensors, _: Tensor | int) -> None:
        """Averages tensors of the same dtype; counters are copied later."""
        if averages[0].is_floating_point() or averages[0].is_complex():
            steps = int(self.n_averaged)  # on the CPU, unlike the argument
            decay = min(self._decay, (1 + steps) / (10 + steps))
            get_ema_multi_avg_fn(decay)(averages, values, steps)
