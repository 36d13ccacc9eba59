"""Methods by the names that recipes have for them, also those of other packages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_args

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
from torchcram.baselines.schedule import SparsitySchedule, Steps
from torchcram.baselines.soft_threshold import STR
from torchcram.baselines.sr_ste import SRSTE
from torchcram.operators.parse import Registry

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.weights import Weights

Kind = TypeVar("Kind", bound=type[Baseline])

_SCHEDULE = {field.name: field for field in fields(SparsitySchedule)}
_COMMON = ("model", "base", "operator", "weights")  # arguments of all methods


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
        own = [name for name, parameter in self._own.items() if _is_time(parameter.annotation)]
        scheduled = [name for name, field in _SCHEDULE.items() if _is_time(field.type)]
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
        known = (*_COMMON, "schedule", "seed")
        return {name: parameter for name, parameter in parameters.items() if name not in known}


def _is_time(annotation: object) -> bool:
    """Whether an annotation is `Steps`, also one that stays a text, or `Steps | None`."""
    if isinstance(annotation, str):
        return "Steps" in re.findall(r"\w+", annotation)
    return Steps in (annotation, *get_args(annotation))


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

CRAM = "cram"
"""Name of `CrAM` itself in recipes, with the arguments of the section `cram`."""

REGISTERED: Registry[Baseline] = Registry(
    "method", "torchcram.methods", (*METHODS, CRAM), frozen=False
)


def register_method(name: str) -> Callable[[Kind], Kind]:
    """Decorates a subclass of `Baseline` so that recipes can name it.

    A recipe with `method: {name: NAME, target: global:0.9, args: {...}}` trains with the class. The
    arguments are those of its constructor; what is annotated as `Steps` is a time, such as
    "30 epochs", and the arguments of a `schedule` are those of `SparsitySchedule`. The first line
    of its docstring is what `torchcram list methods` shows. A package that announces
    `NAME = "package.module"` in the entry-point group "torchcram.methods" is imported when a recipe
    first has that name.

    Args:
        name: Name of the method: a letter, then letters, digits, "-" and "_".

    Raises:
        ValueError: If the name is taken, or the class is not as described.
    """

    def register(kind: Kind) -> Kind:
        if not isinstance(kind, type) or not issubclass(kind, Baseline):
            raise ValueError(f"@register_method({name!r}): {kind!r} is not a subclass of Baseline")
        missing = [each for each in _COMMON if each not in inspect.signature(kind).parameters]
        if missing:
            raise ValueError(
                f"@register_method({name!r}): the constructor of {kind.__qualname__} needs "
                f"{', '.join(_COMMON)}; missing: {', '.join(missing)}"
            )
        REGISTERED.add(name, kind)
        return kind

    return register


def method_names() -> list[str]:
    """Returns the names of all methods, those of other packages last."""
    return [*METHODS, *REGISTERED.names()]


def find_method(name: str) -> Method | None:
    """Returns the method of a name, importing the package that announces it; None if unknown.

    Raises:
        ValueError: If several packages announce the name, or the package cannot be imported.
    """
    if name in METHODS:
        return METHODS[name]
    kind = REGISTERED.find(name)
    if kind is None:
        return None
    return Method(kind, (kind.__doc__ or "").strip().partition("\n")[0])
