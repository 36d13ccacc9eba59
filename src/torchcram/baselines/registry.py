"""Methods by the names that recipes have for them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields
from typing import Any

from torchcram.baselines.acdc import ACDC
from torchcram.baselines.base import Baseline
from torchcram.baselines.dpf import DPF
from torchcram.baselines.gradual_magnitude import GradualMagnitude
from torchcram.baselines.schedule import SparsitySchedule
from torchcram.baselines.sr_ste import SRSTE

_SCHEDULE = {field.name: field for field in fields(SparsitySchedule)}


@dataclass(frozen=True)
class Method:
    """A method that a recipe can name.

    Attributes:
        kind: Class of its optimizer.
        summary: What it does, in a line.
    """

    kind: type[Baseline]
    summary: str

    @property
    def arguments(self) -> list[str]:
        """Names of its arguments; those of `SparsitySchedule` stand for a schedule."""
        return [*self._own, *(_SCHEDULE if self._has_schedule else ())]

    @property
    def times(self) -> list[str]:
        """Names of those arguments that are numbers of steps."""
        own = [name for name, parameter in self._own.items() if parameter.annotation == "Steps"]
        scheduled = [name for name, field in _SCHEDULE.items() if field.type == "Steps"]
        return [*own, *(scheduled if self._has_schedule else ())]

    @property
    def required(self) -> list[str]:
        """Names of those arguments that have no default."""
        own = [name for name, value in self._own.items() if value.default is value.empty]
        return [*own, *(["end"] if self._has_schedule else ())]

    def build(self, *args: Any, arguments: dict[str, Any], **fixed: Any) -> Baseline:  # noqa: ANN401
        """Returns the optimizer.

        Args:
            *args: Model, base optimizer and target.
            arguments: Arguments by the names of `arguments`, times as numbers of steps.
            **fixed: Further keyword arguments of the class.
        """
        own = {name: value for name, value in arguments.items() if name in self._own}
        if self._has_schedule:
            own["schedule"] = SparsitySchedule(
                **{name: value for name, value in arguments.items() if name in _SCHEDULE}
            )
        if "seed" not in inspect.signature(self.kind).parameters:
            fixed.pop("seed", None)
        return self.kind(*args, **own, **fixed)

    @property
    def _has_schedule(self) -> bool:
        return "schedule" in inspect.signature(self.kind).parameters

    @property
    def _own(self) -> dict[str, inspect.Parameter]:
        parameters = inspect.signature(self.kind).parameters
        known = ("model", "base", "operator", "schedule", "weights", "seed")
        return {name: parameter for name, parameter in parameters.items() if name not in known}


METHODS: dict[str, Method] = {
    "gradual-magnitude": Method(
        GradualMagnitude, "prunes the smallest weights further and further, by a cubic schedule"
    ),
    "dpf": Method(DPF, "applies the gradient at the pruned weights to the dense ones"),
    "acdc": Method(ACDC, "alternates phases of dense and of pruned training"),
    "sr-ste": Method(
        SRSTE, "straight-through gradients for N:M patterns, with decay of pruned weights"
    ),
}
