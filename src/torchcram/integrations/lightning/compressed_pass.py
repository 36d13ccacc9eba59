"""Callback that runs the compressed pass of CrAM in Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from torchcram.integrations.adapters import refuse_unused_parameters
from torchcram.integrations.lightning.isolation import FitCallback, Isolation, ignore, shallow
from torchcram.optim import CrAM
from torchcram.optim.rank_consistency import require_alike_everywhere
from torchcram.optim.step_state import RngState

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lightning.pytorch import LightningModule, Trainer
    from torch import Tensor
    from torch.amp import GradScaler


@dataclass(frozen=True)
class _MicroBatch:
    batch: Any
    index: int
    rng_state: RngState | None  # at the start of the first pass, if it is to be replayed


class CompressedPass(FitCallback):
    """Makes a Trainer take the steps of the `CrAM` that `configure_optimizers` returns.

    Lightning runs `training_step` and backward on every micro-batch, at w. After the last one of a
    step, this callback runs them once more on all of them, at w~. Then Lightning unscales, clips
    and steps as usual, with g~. In the compressed pass `self.log` and metrics of torchmetrics have
    no lasting effect, running statistics do not change, and the only hooks called are
    `training_step` and `backward`. The micro-batches of a step are kept until it is taken.

    In manual optimization, enter `self.optimizers().compressed()` in `training_step`; the callback
    then only ensures that `self.optimizers().step()` takes a step with g~.
    """

    def __init__(self) -> None:
        self._optimizer: CrAM | None = None
        self._isolation: Isolation | None = None
        self._micro: list[_MicroBatch] = []
        self._steps: list[tuple[CrAM, Callable[..., Any]]] = []

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the CrAM optimizers and replaces their `step`; all ranks must have the same."""
        optimizers = _optimizers_of(trainer, pl_module)
        for optimizer in optimizers:
            require_alike_everywhere(optimizer)
        self._optimizer = optimizers[0]
        self._isolation = Isolation(pl_module)
        self._micro = []
        self._steps = [(optimizer, optimizer.step) for optimizer in optimizers]
        for optimizer, step in self._steps:  # patched as schedulers do: the closure leaves g~
            optimizer.step = self._called_once(step, trainer, pl_module)  # type: ignore[method-assign]

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Keeps the batch."""
        if self._optimizer is None or not pl_module.automatic_optimization:
            return
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._micro = []
        devices = (parameter.device for parameter in pl_module.parameters())
        rng_state = RngState(devices) if self._optimizer.replay_randomness else None
        self._micro.append(_MicroBatch(shallow(batch), batch_idx, rng_state))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Turns g into g~ once g is complete."""
        if (
            self._optimizer is None
            or self._isolation is None
            or not pl_module.automatic_optimization
        ):
            return
        done = self._micro[-1].index + 1
        last = trainer.is_last_batch or done == trainer.num_training_batches
        if not done % trainer.accumulate_grad_batches or last:
            self._run_passes(trainer, pl_module)

    def _run_passes(self, trainer: Trainer, module: LightningModule) -> None:
        """Runs the micro-batches of this step once more, at w~."""
        assert self._optimizer is not None  # noqa: S101
        assert self._isolation is not None  # noqa: S101
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for _ in self._optimizer.rule.passes:
            with self._optimizer.compressed(grad_scaler=scaler) as needed, self._isolation(ignore):
                for micro in self._micro if needed else ():
                    with _synchronized(trainer, micro is self._micro[-1]):
                        _backward(trainer, module, self._optimizer, micro, scaler)
        self._micro = []

    def _called_once(
        self, step: Callable[..., Any], trainer: Trainer, module: LightningModule
    ) -> Callable[..., Any]:
        """Returns a `step` that calls its closure only once, because it leaves g~ in `.grad`."""

        @functools.wraps(step)
        def once(closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
            loss = None if closure is None else closure()  # g~
            if self._micro and any(p.grad is not None for p in module.parameters()):
                self._run_passes(trainer, module)  # the last micro-batch had no loss
            step()
            return loss

        return once

    def release(self) -> None:
        """Drops optimizers and batches."""
        for optimizer, step in self._steps:
            optimizer.step = step  # type: ignore[method-assign]
        self._optimizer, self._isolation = None, None
        self._steps, self._micro = [], []


def _backward(
    trainer: Trainer,
    module: LightningModule,
    optimizer: CrAM,
    micro: _MicroBatch,
    scaler: GradScaler | None,
) -> None:
    """Runs `training_step` and backward on a micro-batch once more."""
    if micro.rng_state is not None:
        micro.rng_state.restore()
    takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    arguments = (shallow(micro.batch), micro.index) if takes_index else (shallow(micro.batch),)
    output = trainer.strategy.training_step(*arguments)
    loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
    if loss is None:
        return
    loss = loss / trainer.accumulate_grad_batches
    loss = loss if scaler is None else scaler.scale(loss)
    trainer.precision_plugin.backward(loss, module, optimizer)


def _synchronized(trainer: Trainer, last: bool) -> AbstractContextManager[None]:
    """Makes ranks exchange gradients only in the backward of the last micro-batch."""
    if last or not isinstance(trainer.strategy, ParallelStrategy):
        return nullcontext()
    return trainer.strategy.block_backward_sync()


def _optimizers_of(trainer: Trainer, module: LightningModule) -> list[CrAM]:
    """Returns the CrAM optimizers; raises ValueError if they cannot work with the trainer."""
    ours = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, CrAM)]
    if not ours:
        names = ", ".join(type(optimizer).__name__ for optimizer in trainer.optimizers) or "none"
        raise ValueError(f"configure_optimizers must return a CrAM; the optimizers are: {names}")
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy) or strategy.handles_gradient_accumulation:
        raise ValueError(
            f"{type(strategy).__name__} flattens parameters or steps by itself, which CrAM cannot "
            "work with; DDPStrategy and ModelParallelStrategy (fully_shard) do neither"
        )
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ValueError(
            "training_step(dataloader_iter) is not supported: CrAM needs the batches of a step"
        )
    for optimizer in ours:
        refuse_unused_parameters(optimizer, strategy.model)
    return ours
