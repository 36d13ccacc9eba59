"""Whether the content of a checkpoint is the state of a model and its optimizer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


def require_state(
    model: nn.Module, optimizer: Optimizer, device: torch.device, *, state: object
) -> None:
    """Refuses what is not the state of such a training, before anything is loaded.

    Names, shapes and dtypes of all tensors count; what a wrapper such as `CrAM` adds to the state
    of its base optimizer, the wrapper checks itself.

    Args:
        model: Model that the state is for.
        optimizer: Optimizer that the state is for.
        device: Device whose random generator the state may have.
        state: Content of the checkpoint.

    Raises:
        ValueError: If it is something else; the message names what.
    """
    parts = _mapping(state, "state", ("model", "optimizer", "random"))
    _require_tensors(parts["model"], model.state_dict())
    wanted = [key for key in ("state", "cram") if key in optimizer.state_dict()]
    states = _mapping(parts["optimizer"], "state of the optimizer", wanted)
    _require_moments(_mapping(states["state"], "state of the optimizer"), optimizer)
    random = _mapping(parts["random"], "state of random generators", ("cpu",))
    _require_tensors({"cpu": random["cpu"]}, {"cpu": torch.get_rng_state()})
    if device.type == "cuda" and "cuda" in random:
        expected = torch.cuda.get_rng_state(device)
        _require_tensors({"cuda": random["cuda"]}, {"cuda": expected})


def _mapping(given: object, what: str, keys: Sequence[str] = ()) -> Mapping[Any, Any]:
    if not isinstance(given, Mapping):
        raise ValueError(f"its {what} is {given!r:.80}, no mapping")
    for key in keys:
        if key not in given:
            raise ValueError(f"its {what} has no {key!r}")
    return given


def _require_tensors(given: object, expected: Mapping[str, Tensor]) -> None:
    found = _mapping(given, "model", list(expected))
    for name, value in found.items():
        if name not in expected:
            raise ValueError(f"it has {name!r:.80}, which is not there here")
        known = expected[name]
        if not isinstance(value, Tensor):
            raise ValueError(f"its {name!r} is {value!r:.80}, no tensor")
        if value.shape != known.shape or value.dtype != known.dtype or value.is_sparse:
            raise ValueError(f"its {name!r} is {_form(value)}, and here {_form(known)}")


def _require_moments(states: Mapping[Any, Any], optimizer: Optimizer) -> None:
    """Refuses state of parameters that the base optimizer would fail on, or that is not its own."""
    base: Optimizer = getattr(optimizer, "base", optimizer)
    parameters = [p for group in base.param_groups for p in group["params"]]
    shapes = {parameter.shape: _state_shapes(base, parameter.shape) for parameter in parameters}
    if any(shapes.values()) and not states:
        raise ValueError("its state of the optimizer is empty")
    for number, given in states.items():
        if type(number) is not int or not 0 <= number < len(parameters):
            raise ValueError(
                f"its optimizer has a parameter {number!r:.80}, and here are {len(parameters)}"
            )
        entries = _mapping(given, f"state of parameter {number}")
        parameter = parameters[number]
        shaped = shapes[parameter.shape]
        present = {name for name, value in entries.items() if value is not None}
        if missing := shaped.keys() - present:
            raise ValueError(f"its state of parameter {number} has no {min(missing)!r}")
        for name, shape in shaped.items():
            value = entries[name]
            fits = isinstance(value, Tensor) and value.is_floating_point() and not value.is_sparse
            number_like = shape != parameter.shape and shape.numel() == 1
            if not fits or (value.numel() != 1 if number_like else value.shape != shape):
                what = _form(value) if isinstance(value, Tensor) else f"{value!r:.80}"
                raise ValueError(
                    f"its {name!r} of parameter {number} is {what}, and the parameter "
                    f"{_form(parameter)}"
                )


def _state_shapes(base: Optimizer, shape: torch.Size) -> dict[str, torch.Size]:
    """Returns the shapes of what an optimizer keeps for a parameter of a shape; () for numbers.

    torch does not say; a step on a parameter of zeros shows it.
    """
    probe = torch.nn.Parameter(torch.zeros(shape))
    probe.grad = torch.zeros(shape)
    accepted = inspect.signature(type(base)).parameters
    options = {name: value for name, value in base.defaults.items() if name in accepted}
    twin = type(base)([probe], **options)
    twin.step()
    return {
        name: value.shape if isinstance(value, Tensor) else torch.Size(())
        for name, value in twin.state[probe].items()
        if value is not None
    }


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
