"""Methods by the names that recipes have for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torchcram.baselines.acdc import ACDC
from torchcram.baselines.base import Baseline
from torchcram.baselines.dpf import DPF
from torchcram.baselines.frank_wolfe import SFW, CompressionAwareSFW
from torchcram.baselines.gradual_magnitude import GradualMagnitude
from torchcram.baselines.gradual_obs import GradualObs
from torchcram.baselines.l0 import L0
from torchcram.baselines.lottery import LotteryTickets
from torchcram.baselines.movement import Movement, SoftMovement
from torchcram.baselines.platon import PLATON
from torchcram.baselines.schedule import SparsitySchedule
from torchcram.baselines.soft_threshold import STR
from torchcram.baselines.sr_ste import SRSTE

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.weights import Weights

_SCHEDULE = {field.name: field for field in fields(SparsitySchedule)}


@dataclass(frozen=True)
class Method:
    """A method that a recipe can name.

    Attributes:
        kind: Class of its optimizer.
        summary: Line that says what it does.
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

    def build(
        self,
        model: nn.Module,
        base: Optimizer,
        target: str,
        *,
        arguments: dict[str, Any],
        weights: Weights | None = None,
        seed: int = 0,
    ) -> Baseline:
        """Returns the optimizer.

        Args:
            model: Model to train.
            base: Optimizer that takes the steps.
            target: Operator as text.
            arguments: Arguments by the names of `arguments`, times as numbers of steps.
            weights: Weights to prune; by default all `compressible_weights(model)`.
            seed: Seed of methods that draw random numbers.
        """
        own = {name: value for name, value in arguments.items() if name in self._own}
        if self._has_schedule:
            scheduled = {name: value for name, value in arguments.items() if name in _SCHEDULE}
            own["schedule"] = SparsitySchedule(**scheduled)
        if "seed" in inspect.signature(self.kind).parameters:
            own["seed"] = seed
        make: Callable[..., Baseline] = self.kind
        return make(model, base, target, weights=weights, **own)

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
    "str": Method(STR, "learns a threshold for every layer that weights are shrunk by"),
    "sr-ste": Method(
        SRSTE, "straight-through gradients for N:M patterns, with decay of pruned weights"
    ),
    "gradual-obs": Method(
        GradualObs, "gradual pruning by second-order scores, with a correction of what is kept"
    ),
    "lottery-tickets": Method(
        LotteryTickets, "trains, prunes and rewinds to an early epoch, in several rounds"
    ),
    "sfw": Method(SFW, "Frank-Wolfe steps within a polytope of sparse weights; for all sparsities"),
    "compression-aware-sfw": Method(
        CompressionAwareSFW, "Frank-Wolfe steps within a ball of the K-support norm"
    ),
    "l0": Method(L0, "learns random gates, and penalizes the number of open ones"),
    "movement": Method(Movement, "prunes weights that move towards zero, by a cubic schedule"),
    "soft-movement": Method(
        SoftMovement, "prunes weights whose score of movement is below a threshold"
    ),
    "platon": Method(PLATON, "prunes by the sensitivity of the loss and its uncertainty"),
}
