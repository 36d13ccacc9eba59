"""All that the rest of a training depends on, beside the step and the seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def state_of(model: nn.Module, optimizer: Optimizer, device: torch.device) -> dict[str, Any]:
    """Returns the state of the model, the optimizer and the global random generators.

    The parameter groups are left out: the recipe says what is in them, the schedule their learning
    rate, and the device whether the optimizer is fused.
    """
    optimizer_state = optimizer.state_dict()
    del optimizer_state["param_groups"]
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    return {"model": dict(model.state_dict()), "optimizer": optimizer_state, "random": random}


def load_state_(
    model: nn.Module, optimizer: Optimizer, device: torch.device, *, state: dict[str, Any]
) -> None:
    """Continues from what `state_of` returned, on this device or another one."""
    model.load_state_dict(state["model"])
    optimizer.load_state_dict({**optimizer.state_dict(), **state["optimizer"]})
    _align_(optimizer)
    torch.set_rng_state(state["random"]["cpu"])
    if device.type == "cuda" and "cuda" in state["random"]:
        torch.cuda.set_rng_state(state["random"]["cuda"], device)


def _align_(optimizer: Optimizer) -> None:
    """Lays state out in memory as its parameters: fused steps need that, and devices differ."""
    for parameter, entries in optimizer.state.items():
        for name, value in entries.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                entries[name] = torch.empty_like(parameter).copy_(value)


@contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Seeds the global generators of the CPU and of `device`; puts them back afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield
