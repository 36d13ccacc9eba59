"""Validation of compressed models in Lightning, with batch-norm statistics estimated anew."""

from __future__ import annotations

import copy
from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader

from torchcram.batchnorm import tune_batchnorm_
from torchcram.integrations.adapters import compressed_to
from torchcram.integrations.lightning.isolation import (
    FitCallback,
    Isolation,
    LogCapture,
    ignore,
    shallow,
)
from torchcram.operators import Operator, as_operator
from torchcram.optim import CrAM
from torchcram.weights import Weights, compressible_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from lightning.pytorch import LightningModule, Trainer


class CompressedValidation(FitCallback):
    """Validates the model compressed to each of several targets, before it is validated itself.

    What `validation_step` and `on_validation_epoch_end` log as "val_acc" is also logged as
    "val_acc/global:0.9", so that `ModelCheckpoint` and `EarlyStopping` can monitor it. Weights,
    buffers, metrics and random generators are restored bit for bit. Nothing is validated in
    the sanity check. LoRA adapters of peft are merged before compression, as in deployment.

    Args:
        targets: Operators, or their texts.
        batchnorm_batches: Number of the last training batches that are kept to estimate batch-norm
            statistics on; 0 leaves the statistics unchanged. Ranks average their statistics. In
            manual optimization a model with batch norm needs 0.
        weights: Function that returns the weights to compress from the module; by default those of
            the `CrAM` optimizer, or all compressible weights without one.
    """

    def __init__(
        self,
        targets: Sequence[Operator | str],
        batchnorm_batches: int = 8,
        *,
        weights: Callable[[LightningModule], Weights] | None = None,
    ) -> None:
        self.targets = tuple(as_operator(target) for target in targets)
        for target in self.targets:
            if target.is_range:
                raise ValueError(f"{target} is a range to train over, not a target")
        if batchnorm_batches < 0:
            raise ValueError(f"batchnorm_batches={batchnorm_batches!r} is not at least 0")
        self._weights = weights
        self._tunes = False
        self._batches: deque[tuple[Any, int]] = deque(maxlen=batchnorm_batches)
        self._results: list[tuple[str, LogCapture]] = []

    def on_fit_start(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,
    ) -> None:
        """Determines whether there are batch-norm statistics to estimate."""
        self._tunes = self._tunes_in(pl_module)
        if self._tunes and not pl_module.automatic_optimization:
            raise ValueError(
                "tuning batch norm runs training_step, which trains in manual optimization; "
                f"batchnorm_batches={self._batches.maxlen} was given, only batchnorm_batches=0 is "
                "allowed there"
            )

    def on_train_batch_start(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,  # noqa: ARG002
        batch: object,
        batch_idx: int,
    ) -> None:
        """Keeps the batch for batch norm."""
        if self._tunes:
            self._batches.append((shallow(batch), batch_idx))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validates the model at every target."""
        self._results = []
        if trainer.sanity_checking:
            return
        tunes = self._tunes_in(pl_module)
        if tunes and not self._batches:
            rank_zero_warn(
                "training batches are kept during fit only, so batch norm cannot be tuned: no "
                "compressed validation this time (batchnorm_batches=0 does without)"
            )
            return
        isolation = Isolation(pl_module)
        weights = self._weights_of(trainer, pl_module)
        for target in self.targets:
            logged = LogCapture()
            with isolate_rng(), compressed_to(target, pl_module, weights):
                if tunes:
                    with isolation(ignore):
                        tune(trainer, pl_module, self._batches)
                with isolation(logged):
                    _validate(trainer, pl_module, logged)
                    logged.compute()
            self._results.append((str(target), logged))

    def on_validation_epoch_end(
        self,
        trainer: Trainer,  # noqa: ARG002
        pl_module: LightningModule,
    ) -> None:
        """Logs the results of all targets."""
        for target, logged in self._results:
            for name, (value, options) in logged.values.items():
                pl_module.log(f"{name}/{target}", value, add_dataloader_idx=False, **options)
        self._results = []

    def release(self) -> None:
        """Drops batches and results."""
        self._tunes, self._results = False, []
        self._batches.clear()

    def _tunes_in(self, module: LightningModule) -> bool:
        return bool(self._batches.maxlen) and bool(batch_norms(module))

    def _weights_of(self, trainer: Trainer, module: LightningModule) -> Weights:
        if self._weights is not None:
            return self._weights(module)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, CrAM) and optimizer.weights:
                return optimizer.weights
        return compressible_weights(module)


def _validate(trainer: Trainer, module: LightningModule, logged: LogCapture) -> None:
    """Runs the validation loop of `module` once."""
    loaders = CombinedLoader(trainer.val_dataloaders, "sequential").flattened
    module.on_validation_epoch_start()
    for number, (loader, count) in enumerate(zip(loaders, trainer.num_val_batches, strict=True)):
        several = (number,) if len(loaders) > 1 else ()
        takes = is_param_in_hook_signature(module.validation_step, "batch_idx", min_args=2)
        limit = None if count == float("inf") else int(count)
        for index, batch in enumerate(islice(_own_iterator(loader), limit)):
            batch = trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=number)
            batch = trainer.strategy.batch_to_device(batch, dataloader_idx=number)
            logged.at(batch, *(several or (None,)))
            trainer.strategy.validation_step(batch, *((index,) if takes else ()), *several)
    logged.at(None, None)
    module.on_validation_epoch_end()


def _own_iterator(loader: Iterable[Any]) -> Iterator[Any]:
    """Returns an iterator that does not share persistent workers with Lightning's own."""
    if isinstance(loader, DataLoader) and loader.persistent_workers:
        twin = copy.copy(loader)
        twin._iterator = None
        return iter(twin)
    return iter(loader)


class _TrainingStep(nn.Module):
    """Module whose `forward` calls `training_step`."""

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__()
        self.module = module
        self._context = trainer.precision_plugin.train_step_context

    def forward(self, batch: tuple[Any, int]) -> None:
        takes = is_param_in_hook_signature(self.module.training_step, "batch_idx", min_args=2)
        with self._context():
            self.module.training_step(*(batch if takes else batch[:1]))


def tune(trainer: Trainer, module: LightningModule, batches: Iterable[tuple[Any, int]]) -> None:
    """Estimates batch-norm statistics on `batches`, averaged over ranks."""
    step = _TrainingStep(trainer, module)
    tune_batchnorm_(step, [((shallow(batch), index),) for batch, index in batches])
    for layer in batch_norms(module):
        for buffer in (layer.running_mean, layer.running_var):
            if buffer is not None:
                buffer.copy_(trainer.strategy.reduce(buffer.clone(), reduce_op="mean"))


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Returns the batch-norm layers that have running statistics."""
    layers = [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None]
