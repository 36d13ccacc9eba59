"""Checks of the arguments of `CrAM`, made before anything is changed."""

from __future__ import annotations

import functools
import math
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from torchcram.optim.rules import UpdateRule

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.amp import GradScaler

    from torchcram.operators import Operator

PLAIN_STEP = (
    "step() would take a plain step of {base}: no compressed pass went before it. Either pass a "
    "closure, optimizer.step(closure); or run backward a second time in `with "
    "optimizer.compressed():` before optimizer.step(); or use what torchcram.integrations has for "
    "your loop: CompressedPass for Lightning, CrAMTrainer in place of the Trainer of Transformers. "
    "CrAM(..., allow_plain_steps=True) takes plain steps."
)
ACCUMULATION = (
    "Lightning accumulates gradients over {count} batches and gives CrAM the closure of the last "
    "one only: add torchcram.integrations.lightning.CompressedPass() to the callbacks of the "
    "Trainer, which runs the compressed pass over all of them"
)


def check_arguments(
    model: nn.Module,
    base: Optimizer,
    operators: Sequence[Operator],
    rule: UpdateRule,
    rho: float | None,
    mask_interval: int,
    base_step_probability: float,
) -> None:
    """Raises ValueError for arguments of `CrAM` that are not allowed."""
    if isinstance(model, Optimizer) and isinstance(base, nn.Module):
        raise ValueError("model and base are swapped: CrAM(model, base, operators)")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model={model!r} is not a torch.nn.Module")
    if rule.compresses and not operators:
        raise ValueError(f"{rule.name} needs at least one operator, and the list is empty")
    check_base(model, base)
    if "rho" not in base.defaults:
        for group in base.param_groups:
            _check_rho(group.get("rho", rho))
    _check_rho(rho)
    if not isinstance(mask_interval, int) or mask_interval < 1:
        raise ValueError(f"mask_interval={mask_interval!r} is not a positive integer")
    if not 0 <= base_step_probability <= 1:
        raise ValueError(f"base_step_probability={base_step_probability!r} is not in [0, 1]")


def check_ascent(
    norm: float | None, rule: UpdateRule, *, normalize: bool, rhos: Iterable[float]
) -> None:
    """Raises ValueError unless `max_ascent_norm` is positive and has an effect."""
    if norm is None:
        return
    if not isinstance(norm, (int, float)) or not norm > 0:
        raise ValueError(f"max_ascent_norm={norm!r} is neither None nor positive")
    if normalize or not any(pass_.ascend for pass_ in rule.passes):
        reason = "ascends along g/|g|, of length 1" if normalize else "does not ascend"
        raise ValueError(f"max_ascent_norm={norm!r} has no effect: {rule.name} {reason}")
    if not any(rhos):
        raise ValueError(f"max_ascent_norm={norm!r} has no effect: rho is 0, so nothing ascends")


def check_rule(rule: object) -> None:
    """Raises ValueError unless `rule` is an update rule."""
    if not isinstance(rule, UpdateRule):
        raise ValueError(
            f"rule={rule!r} is not an UpdateRule; allowed: torchcram.CRAM_PLUS, CRAM, SAM, C_SAM, "
            "TOPK and TOPK_PLUS, or an UpdateRule of your own"
        )


def check_still_scaled(optimizer: Optimizer, scaler: GradScaler | None) -> None:
    """Raises RuntimeError if `scaler` has unscaled g already, which the next pass adds to."""
    states = getattr(scaler, "_per_optimizer_states", {})
    if id(optimizer) in states and states[id(optimizer)]["stage"].name == "UNSCALED":
        raise RuntimeError("unscale_() was called before compressed(): call it after, on g~")


def check_closure(closure: object) -> None:
    """Raises RuntimeError for a closure of Lightning that covers only a part of the batch."""
    lightning = sys.modules.get("lightning.pytorch")
    if lightning is None or not isinstance(closure, functools.partial) or not closure.args:
        return
    module = closure.args[0]  # as Precision.optimizer_step of Lightning binds it
    if isinstance(module, lightning.LightningModule):
        count = module.trainer.accumulate_grad_batches
        if count > 1:
            raise RuntimeError(ACCUMULATION.format(count=count))


def check_base(model: nn.Module, base: Optimizer) -> None:
    """Raises ValueError unless `base` is an optimizer of parameters of `model`."""
    if not isinstance(base, Optimizer):
        raise ValueError(f"base={base!r} is not a torch.optim.Optimizer")
    if isinstance(base, LBFGS):
        raise ValueError("LBFGS calls the closure itself and cannot be the base optimizer")
    for number, group in enumerate(base.param_groups):
        _check_members(model, group["params"], number)


def check_param_group(
    model: nn.Module, base: Optimizer, group: dict[str, Any], number: int
) -> None:
    """Raises ValueError if a parameter group cannot be added to `base` as group `number`."""
    members = group.get("params", ())
    members = [members] if isinstance(members, Tensor) else members
    _check_members(model, [p[1] if isinstance(p, tuple) else p for p in members], number)
    if "rho" not in base.defaults and "rho" in group:
        _check_rho(group["rho"])


def _check_members(model: nn.Module, parameters: Sequence[Tensor], number: int) -> None:
    """Raises ValueError unless all parameters of group `number` are part of `model`."""
    known = {id(parameter) for parameter in model.parameters()}
    for index, parameter in enumerate(parameters):
        if isinstance(parameter, Tensor) and id(parameter) not in known:
            raise ValueError(
                f"{type(model).__name__} does not have parameter {index} of group {number} of "
                f"the base optimizer, of shape {tuple(parameter.shape)}"
            )


def _check_rho(rho: float | None) -> None:
    if rho is None:
        return
    if not isinstance(rho, (int, float)) or not math.isfinite(rho) or rho < 0:
        raise ValueError(f"rho={rho!r} is neither None nor a finite number of at least 0")
