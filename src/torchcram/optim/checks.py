"""What `CrAM` refuses, before anything is touched."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torchcram.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn
    from torch.optim import Optimizer

    from torchcram.optim.rules import UpdateRule
    from torchcram.weights import Weights


def check_arguments(
    model: nn.Module,
    base: Optimizer,
    operators: Sequence[Operator],
    weights: Weights,
    rule: UpdateRule,
    rho: float,
    mask_interval: int,
    base_step_probability: float,
) -> None:
    """Raises ValueError with what was given and what is allowed."""
    _check_operators(operators, rule)
    _check_ownership(model, base, weights)
    for group in base.param_groups:
        _check_rho(group.get("rho", rho))
    _check_rho(rho)
    if not isinstance(mask_interval, int) or mask_interval < 1:
        raise ValueError(f"mask_interval={mask_interval!r} is not a positive integer")
    if not 0 <= base_step_probability <= 1:
        raise ValueError(f"base_step_probability={base_step_probability!r} is not in [0, 1]")


def _check_operators(operators: Sequence[Operator], rule: UpdateRule) -> None:
    if rule.compresses and not operators:
        raise ValueError(f"{rule.name} needs at least one operator, and the list is empty")
    for operator in operators:
        if not isinstance(operator, Operator):
            raise ValueError(
                f"{operator!r} is not an Operator; parse_operator() reads one from text"
            )


def _check_ownership(model: nn.Module, base: Optimizer, weights: Weights) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for number, group in enumerate(base.param_groups):
        for place, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"{type(model).__name__} does not have parameter {place} of group {number} of "
                    f"the base optimizer, of shape {tuple(parameter.shape)}"
                )
    for name, weight in weights.items():
        if id(weight) not in known:
            raise ValueError(f"weights[{name!r}] is not a parameter of {type(model).__name__}")


def _check_rho(rho: float) -> None:
    if not isinstance(rho, (int, float)) or not math.isfinite(rho) or rho < 0:
        raise ValueError(f"rho={rho!r} is not a finite number of at least 0")
