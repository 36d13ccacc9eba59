"""CrAM in the Trainer of Transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import Trainer

from torchcram.batches import check_shares, split_batch, split_unless_short
from torchcram.integrations.adapters import ALL_USED, is_lora_cram
from torchcram.optim import CrAM
from torchcram.optim.rank_consistency import require_alike_everywhere

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.operators import Operator

__all__ = ["CrAMTrainer"]


class CrAMTrainer(Trainer):  # type: ignore[misc]
    """Trainer that wraps its optimizer in `CrAM` and takes the steps of `CrAM`.

    `training_step` runs on every micro-batch of a step at w and, after the last one, once more on
    all of them at w~, with the same normalisation of the loss. The Trainer then clips, steps,
    schedules, logs, saves and resumes as usual. The micro-batches of a step are kept until then.

    With shares, every micro-batch is split: its first rows are for the pass at w, its last rows for
    the passes at w~, and the loss of a pass is normalised by the items of its own rows. A batch
    with too few rows to split, often the last one of an epoch, is taken whole by all passes; the
    first batch of a training must have enough.

    Args:
        *args: Positional arguments of `Trainer`.
        cram: Function that makes the optimizer from the model and the base optimizer, such as
            `lambda model, base: CrAM(model, base, ["global:0.5", "nm:2:4"], rho=0.01)`.
        dense_share: Share of every micro-batch in the pass at w, above 0 and at most 1.
        compressed_share: Share of every micro-batch in the passes at w~, above 0 and at most 1; 0.5
            for both makes a step as cheap as a plain one.
        **kwargs: Keyword arguments of `Trainer`.

    Raises:
        ValueError: If a share is out of range. Training raises it, before a step is taken, for a
            batch that cannot be split.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        cram: Callable[[nn.Module, Optimizer], CrAM],
        dense_share: float = 1.0,
        compressed_share: float = 1.0,
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        check_shares(dense_share, compressed_share)
        self._cram = cram
        self._shares = (dense_share, compressed_share)
        self._splits = self._shares != (1, 1)
        self._micro: list[dict[str, Any]] = []  # what the passes at w~ take
        self._compressed_items: Tensor | int | None = None  # of the whole step at w~
        self._compared = False  # whether all ranks were found to have the same settings
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:  # noqa: ANN401
        """Creates the optimizer of the Trainer, unless it was given one, and wraps it."""
        super().create_optimizer(*args, **kwargs)
        if _cram_in(self.optimizer) is None:
            self._require_whole_parameters()
            wrapped = self._cram(self.model, self.optimizer)
            if not isinstance(wrapped, CrAM):
                raise TypeError(
                    f"cram must be a function that returns a CrAM, got {type(wrapped).__name__}"
                )
            self.optimizer = wrapped
        self._require_all_used()
        self._micro, self._compared = [], False
        return self.optimizer  # type: ignore[no-any-return]

    def get_batch_samples(
        self,
        epoch_iterator: Iterator[dict[str, Any]],
        num_batches: int,
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Returns the micro-batches of a step, and the number of items that the pass at w takes."""
        if not self._splits:
            return super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)  # type: ignore[no-any-return]
        batches = list(islice(epoch_iterator, num_batches))
        if batches and not self.state.global_step:
            split_batch(batches[0], *self._shares)  # raises an error if it is too short
        parts = [split_unless_short(batch, *self._shares) for batch in batches]
        items = []
        for number in range(2):
            part = [pair[number] for pair in parts]
            counted = super().get_batch_samples(iter(part), len(part), *args, **kwargs)[1]
            items.append(_at_least_one(counted))
        dense_items, self._compressed_items = items
        return batches, dense_items

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Adds to g, and turns it into g~ after the last micro-batch; returns the loss at w."""
        optimizer = _cram_in(self.optimizer)
        assert optimizer is not None  # noqa: S101
        if not self._compared:
            require_alike_everywhere(optimizer)
            self._compared = True
        again, compressed_items = inputs, num_items_in_batch
        if self._splits:
            inputs, again = split_unless_short(inputs, *self._shares)
            compressed_items = self._compressed_items
        self._micro.append({**again})  # the loss may pop the labels
        loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
        if not self.accelerator.sync_gradients:
            return loss
        for _ in optimizer.rule.passes:
            with optimizer.compressed(grad_scaler=self.accelerator.scaler) as needed:
                for number, again in enumerate(self._micro if needed else (), 1):
                    last = number == len(self._micro)
                    with nullcontext() if last else self.accelerator.no_sync(model):
                        super().training_step(model, {**again}, compressed_items)
        self._micro = []
        return loss

    def compress(self, operator: Operator | str) -> nn.Module:
        """Returns a copy of the trained model, compressed: see `CrAM.compress`.

        Args:
            operator: Operator, or its text, such as "global:0.9".

        Raises:
            RuntimeError: If nothing has been trained yet.
        """
        optimizer = _cram_in(self.optimizer)
        if optimizer is None:
            raise RuntimeError("there is no optimizer before train(): use torchcram.compress")
        return optimizer.compress(operator)

    def _require_whole_parameters(self) -> None:
        for name, enabled in (
            ("DeepSpeed", self.is_deepspeed_enabled),
            ("FSDP", self.is_fsdp_enabled),
        ):
            if enabled:
                raise ValueError(
                    f"{name} replaces the parameters after the optimizer was made, which is not "
                    "supported; one process and DDP are"
                )

    def _require_all_used(self) -> None:
        searches = self.args.ddp_find_unused_parameters is not False  # None: the Trainer decides
        if searches and self.args.world_size > 1 and is_lora_cram(_cram_in(self.optimizer)):
            raise ValueError(ALL_USED.format("ddp_find_unused_parameters"))


def _at_least_one(items: Tensor | int | None) -> Tensor | int | None:
    """Returns a number of items to divide by: labels that do not count leave a loss of 0."""
    if items is None:
        return None
    return items.clamp(min=1) if isinstance(items, Tensor) else max(items, 1)


def _cram_in(optimizer: object) -> CrAM | None:
    """Returns the CrAM optimizer inside wrappers of Accelerate; None if there is none."""
    while optimizer is not None and not isinstance(optimizer, CrAM):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
