"""CrAM in the Trainer of Transformers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from transformers import Trainer

from torchcram.integrations.adapters import ALL_USED, is_lora_cram
from torchcram.optim import CrAM
from torchcram.optim.rank_consistency import require_alike_everywhere

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.operators import Operator

__all__ = ["CrAMTrainer"]


class CrAMTrainer(Trainer):  # type: ignore[misc]
    """Trainer that wraps its optimizer in `CrAM` and takes the steps of `CrAM`.

    `training_step` runs on every micro-batch of a step at w and, after the last one, once more on
    all of them at w~, with the same normalisation of the loss. The Trainer then clips, steps,
    schedules, logs, saves and resumes as usual. The micro-batches of a step are kept until then.

    Args:
        *args: Positional arguments of `Trainer`.
        cram: Function that makes the optimizer from the model and the base optimizer, such as
            `lambda model, base: CrAM(model, base, ["global:0.5", "nm:2:4"], rho=0.01)`.
        **kwargs: Keyword arguments of `Trainer`.
    """

    optimizer: Any

    def __init__(
        self,
        *args: Any,  # noqa: ANN401
        cram: Callable[[nn.Module, Optimizer], CrAM],
        **kwargs: Any,  # noqa: ANN401
    ) -> None:
        self._cram = cram
        self._micro: list[dict[str, Any]] = []
        self._compared = False  # whether all ranks were found to have the same settings
        super().__init__(*args, **kwargs)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Optimizer:  # noqa: ANN401
        """Creates the optimizer of the Trainer, unless it was given one, and wraps it."""
        super().create_optimizer(*args, **kwargs)
        if _cram_in(self.optimizer) is None:
            self._require_whole_parameters()
            self.optimizer = self._cram(self.model, self.optimizer)
        self._require_all_used()
        self._micro, self._compared = [], False
        return self.optimizer  # type: ignore[no-any-return]

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        *args: Any,  # noqa: ANN401
        **kwargs: Any,  # noqa: ANN401
    ) -> Tensor:
        """Adds to g, and turns it into g~ after the last micro-batch; returns the loss at w."""
        optimizer = _cram_in(self.optimizer)
        assert optimizer is not None  # noqa: S101
        if not self._compared:
            require_alike_everywhere(optimizer)
            self._compared = True
        self._micro.append({**inputs})  # the loss may pop the labels
        loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
        if not self.accelerator.sync_gradients:
            return loss
        for _ in optimizer.rule.passes:
            with optimizer.compressed(grad_scaler=self.accelerator.scaler) as needed:
                for number, again in enumerate(self._micro if needed else (), 1):
                    last = number == len(self._micro)
                    with nullcontext() if last else self.accelerator.no_sync(model):
                        super().training_step(model, {**again}, *args, **kwargs)
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


def _cram_in(optimizer: object) -> CrAM | None:
    """Returns the CrAM optimizer inside wrappers of Accelerate; None if there is none."""
    while optimizer is not None and not isinstance(optimizer, CrAM):
        optimizer = getattr(optimizer, "optimizer", None)
    return optimizer
