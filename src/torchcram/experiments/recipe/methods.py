"""Section `method` of a recipe: a method that CrAM is compared with, and its arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchcram.baselines.registry import CRAM, Method, find_method, method_names
from torchcram.experiments.io.dataclass_io import (
    UNLESS_DEFAULT,
    BadValue,
    did_you_mean,
    shown,
)
from torchcram.experiments.recipe.checks import read_operator, require_arguments

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.baselines import Baseline
    from torchcram.weights import Weights

TIME = "a number of steps, of epochs as in `30 epochs`, or a part of the training as in `75 %`"
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(epochs?|%)")


@dataclass(frozen=True)
class MethodConfig:
    """Method that the model is trained with: one of `torchcram.baselines`, or a registered one.

    Attributes:
        name: Name of the method, as `torchcram list methods` shows it.
        target: Operator as text that the training ends at.
        args: Arguments of the method. A time is a number of steps, or a text such as "30 epochs"
            and "75 %".
        dense_ends: Whether the first and the last compressible layer stay dense.
        only: Regular expression that the names of the weights must match; null matches all.
        skip: Regular expression of the names of weights that stay dense.
    """

    name: str
    target: str
    args: dict[str, Any] | None = field(default=None, hash=False, metadata=UNLESS_DEFAULT)
    dense_ends: bool = False
    only: str | None = None
    skip: str | None = None

    def __post_init__(self) -> None:
        method = self.method
        operator = read_operator("target", self.target)
        object.__setattr__(self, "target", str(operator))
        try:
            method.kind.check_operator(operator)
        except ValueError as error:
            problem, _, allowed = str(error).partition("; allowed are ")
            raise BadValue("target", f"is {operator}: {problem}", allowed) from None
        args = self.args or {}
        with require_arguments("args", args, method.arguments):
            pass
        for name in method.required:
            if name not in args:
                allowed = TIME if name in method.times else "a value"
                raise BadValue(f"args.{name}", f"is missing; {self.name} needs it", allowed)
        for name in method.times:
            if name in args:
                read_time(f"args.{name}", args[name], epochs=1, steps_per_epoch=1)

    @property
    def method(self) -> Method:
        """Method of this name.

        Raises:
            BadValue: If there is none.
        """
        method = find_method(self.name)
        if method is None:
            names = [CRAM, *method_names()]
            problem = f"is {shown(self.name)}{did_you_mean(self.name, names)}"
            raise BadValue("name", problem, ", ".join(names))
        return method

    def arguments(self, epochs: int, steps_per_epoch: int) -> dict[str, Any]:
        """Returns the arguments with all times as numbers of steps."""
        times = self.method.times
        return {
            name: read_time(
                f"method.args.{name}", value, epochs=epochs, steps_per_epoch=steps_per_epoch
            )
            if name in times
            else value
            for name, value in (self.args or {}).items()
        }

    def build(
        self,
        model: nn.Module,
        base: Optimizer,
        *,
        weights: Weights,
        epochs: int,
        steps_per_epoch: int,
        seed: int,
    ) -> Baseline:
        """Returns the optimizer of the method around `base`.

        Args:
            model: Model to train.
            base: Base optimizer.
            weights: Weights to prune.
            epochs: Number of epochs of the training.
            steps_per_epoch: Number of steps in an epoch.
            seed: Seed of methods that draw random numbers.

        Raises:
            BadValue: If the arguments do not fit the method or the length of the training.
        """
        args = self.arguments(epochs, steps_per_epoch)
        try:
            optimizer = self.method.build(
                model, base, self.target, arguments=args, weights=weights, seed=seed
            )
        except TypeError:
            problem = f"a value has another type than {self.name} takes"
            raise self._bad_arguments(problem, "numbers, as in its docstring") from None
        except ValueError as error:
            raise self._bad_arguments(error, f"values that {self.name} takes") from None
        try:
            optimizer.check_length(epochs * steps_per_epoch)
        except ValueError as error:
            allowed = f"times within {epochs} epochs of {steps_per_epoch} steps"
            raise self._bad_arguments(error, allowed) from None
        return optimizer

    def _bad_arguments(self, problem: object, allowed: str) -> BadValue:
        given = ", ".join(f"{name}: {value}" for name, value in (self.args or {}).items())
        return BadValue("method.args", f"is {{{given}}}: {problem}", allowed)


def read_time(key: str, value: object, *, epochs: int, steps_per_epoch: int) -> int:
    """Returns a time in steps.

    Args:
        key: Key of the value, for messages.
        value: Number of steps, or a text such as "30 epochs" and "75 %".
        epochs: Number of epochs of the training.
        steps_per_epoch: Number of steps in an epoch.

    Raises:
        BadValue: If it is neither.
    """
    if type(value) is int and value >= 0:
        return value
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise BadValue(key, f"is {value!r}", TIME)
    number = float(match[1])
    part = epochs * number / 100 if match[2] == "%" else number
    return round(part * steps_per_epoch)
