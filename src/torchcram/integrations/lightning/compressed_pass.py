"""Callback that runs the compressed pass of CrAM in Lightning."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lightning.pytorch.strategies import FSDPStrategy, ParallelStrategy
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from torchcram.batches import check_shares, split_batch, split_unless_short
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
    batch: Any  # what the passes at w~ take
    index: int
    rng_state: RngState | None  # at the start of the first pass, if it is to be replayed


class CompressedPass(FitCallback):
    """Makes a Trainer take the steps of the `CrAM` that `configure_optimizers` returns.

    Lightning runs `training_step` and backward on every micro-batch, at w. After the last one of a
    step, this callback runs them once more on all of them, at w~. Then Lightning unscales, clips
    and steps as usual, with g~. In the compressed pass `self.log` and metrics of torchmetrics have
    no lasting effect, running statistics do not change, and the only hooks called are
    `training_step` and `backward`. The micro-batches of a step are kept until it is taken.

    With shares, `training_step` gets the first rows of every micro-batch at w and the last rows at
    w~; all other hooks, callbacks and loggers see the whole batch. A batch with too few rows to
    split, often the last one of an epoch, is taken whole by all passes; the first batch of a
    training must have enough.

    In manual optimization, enter `self.optimizers().compressed()` in `training_step`; the callback
    then only ensures that `self.optimizers().step()` takes a step with g~. Batches are split by
    `split_batch` there.

    Args:
        dense_share: Share of every micro-batch in the pass at w, above 0 and at most 1.
        compressed_share: Share of every micro-batch in the passes at w~, above 0 and at most 1; 0.5
            for both makes a step as cheap as a plain one.

    Raises:
        ValueError: If a share is out of range. Fitting raises it, before a step is taken, for a
            batch that cannot be split, and for shares in manual optimization.
    """

    def __init__(self, dense_share: float = 1.0, compressed_share: float = 1.0) -> None:
        check_shares(dense_share, compressed_share)
        self._shares = (dense_share, compressed_share)
        self._optimizer: CrAM | None = None
        self._isolation: Isolation | None = None
        self._index = 0  # of the current batch
        self._micro: list[_MicroBatch] = []
        self._replaced: list[tuple[Any, str, Callable[..., Any]]] = []  # methods of instances
        self._training_step: Callable[..., Any] | None = None  # that of the strategy

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds the CrAM optimizers; replaces their `step` and the `training_step` of the strategy.

        All ranks must have the same optimizers.
        """
        optimizers = _optimizers_of(trainer, pl_module)
        if not pl_module.automatic_optimization and self._splits:
            raise ValueError(
                f"shares of {self._shares[0]} and {self._shares[1]} were given, but in manual "
                "optimization training_step takes the passes itself: use torchcram.split_batch "
                "there, and CompressedPass() without shares"
            )
        for optimizer in optimizers:
            require_alike_everywhere(optimizer)
        self._optimizer = optimizers[0]
        self._isolation = Isolation(pl_module)
        self._micro = []
        for optimizer in optimizers:  # patched as schedulers do: the closure leaves g~
            self._replace(optimizer, "step", self._called_once(optimizer.step, trainer, pl_module))
        self._training_step = trainer.strategy.training_step
        if pl_module.automatic_optimization:
            step_at_w = self._at_w(self._training_step, trainer, pl_module)
            self._replace(trainer.strategy, "training_step", step_at_w)

    def on_train_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: object,  # noqa: ARG002
        batch_idx: int,
    ) -> None:
        """Drops the micro-batches of the step before."""
        self._index = batch_idx
        if pl_module.automatic_optimization and batch_idx % trainer.accumulate_grad_batches == 0:
            self._micro = []

    def _replace(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """Replaces a method of an instance until `release`."""
        self._replaced.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def _at_w(
        self, training_step: Callable[..., Any], trainer: Trainer, module: LightningModule
    ) -> Callable[..., Any]:
        """Returns a `training_step` for the pass at w, which keeps the part for those at w~."""

        @functools.wraps(training_step)
        def step_at_w(batch: Any, *args: Any) -> Any:  # noqa: ANN401
            assert self._optimizer is not None  # noqa: S101
            dense, compressed = batch, shallow(batch)
            if self._splits:
                is_first = trainer.global_step == self._index == 0
                split = split_batch if is_first else split_unless_short
                dense, compressed = split(batch, *self._shares)
            devices = (parameter.device for parameter in module.parameters())
            rng_state = RngState(devices) if self._optimizer.replay_randomness else None
            self._micro.append(_MicroBatch(compressed, self._index, rng_state))
            return training_step(dense, *args)

        return step_at_w

    @property
    def _splits(self) -> bool:
        return self._shares != (1, 1)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Turns g into g~ once g is complete."""
        if (
            self._optimizer is None
            or self._isolation is None
            or not pl_module.automatic_optimization
        ):
            return
        done = self._index + 1
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
                        self._backward(trainer, module, micro, scaler)
        self._micro = []

    def _backward(
        self,
        trainer: Trainer,
        module: LightningModule,
        micro: _MicroBatch,
        scaler: GradScaler | None,
    ) -> None:
        """Runs `training_step` and backward on a micro-batch once more."""
        assert self._optimizer is not None  # noqa: S101
        assert self._training_step is not None  # noqa: S101
        if micro.rng_state is not None:
            micro.rng_state.restore()
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        arguments = (shallow(micro.batch), micro.index) if takes_index else (shallow(micro.batch),)
        output = self._training_step(*arguments)
        loss: Tensor | None = output["loss"] if isinstance(output, Mapping) else output
        if loss is None:
            return
        loss = loss / trainer.accumulate_grad_batches
        loss = loss if scaler is None else scaler.scale(loss)
        trainer.precision_plugin.backward(loss, module, self._optimizer)

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
        """Drops optimizers and batches, and puts the methods back that were replaced."""
        for owner, name, method in reversed(self._replaced):
            vars(owner).pop(name, None)
            if getattr(owner, name) != method:
                setattr(owner, name, method)
        self._optimizer, self._isolation, self._training_step = None, None, None
        self._replaced, self._micro = [], []


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
