"""Batch-norm statistics of a LightningModule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from torchcram.batchnorm import tune_batchnorm_
from torchcram.integrations.lightning.isolation import shallow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from lightning.pytorch import LightningModule, Trainer


class _TrainingStep(nn.Module):
    """Makes a call out of `training_step`, whatever `forward` may be."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self._context = trainer.precision_plugin.train_step_context

    def forward(self, batch: tuple[Any, int]) -> None:
        takes = is_param_in_hook_signature(self.module.training_step, "batch_idx", min_args=2)
        with self._context():
            self.module.training_step(*(batch if takes else batch[:1]))


def tune(trainer: Trainer, module: LightningModule, batches: Iterable[tuple[Any, int]]) -> None:
    """Estimates batch-norm statistics on `batches`; processes average theirs."""
    step = _TrainingStep(trainer, module)
    tune_batchnorm_(step, [((shallow(batch), index),) for batch, index in batches])
    for layer in batch_norms(module):
        for buffer in (layer.running_mean, layer.running_var):
            if buffer is not None:
                buffer.copy_(trainer.strategy.reduce(buffer.clone(), reduce_op="mean"))


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Returns the batch-norm layers that have running statistics."""
    found = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in found if layer.running_mean is not None]
