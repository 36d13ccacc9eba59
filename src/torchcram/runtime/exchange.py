"""Exchanging the layers of a model for sparse ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchcram.native.library import has_int8
from torchcram.runtime.layers import (
    Choice,
    Races,
    by_measure,
    by_rule,
    candidates,
    obstacle,
    sparsity_of,
)
from torchcram.runtime.modules import PackedLayer

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a model is called with: a tensor, arguments, or keyword arguments."""


def exchange_layers_(
    model: nn.Module,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    *,
    int8: bool = False,
) -> list[Choice]:
    """Gives layers sparse kernels where it pays, in place; returns what was done.

    Args:
        model: dense.
        shapes: of the inputs of the layers that are reached, to measure; None goes by a rule.
        int8: whether 8 bits are allowed.
    """
    int8 = int8 and has_int8()
    races: Races = {}
    choices = []
    for name, layer in candidates(model).items():
        problem = obstacle(layer)
        if problem is None and shapes is not None and name not in shapes:
            problem = "the example does not reach it"
        if problem is not None:
            choices.append(left(name, layer, problem))
            continue
        new: nn.Module | None
        if shapes is not None:
            choice, new = by_measure(name, layer, shapes[name], races=races, int8=int8)
        else:
            choice, new = by_rule(name, layer, int8=int8)
        if new is not None:
            _replace_everywhere_(model, layer, new)
        choices.append(choice)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(one, PackedLayer) for one in module.modules()
        ):
            module.activation_relu_or_gelu = 0  # its shortcut would unpack the weights
    return choices


def _replace_everywhere_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in model.modules():
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


def input_shapes(model: nn.Module, example: Inputs) -> dict[str, tuple[int, ...]]:
    """Runs the example and returns the shapes of what its layers get, by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    handles = []
    for name, layer in candidates(model).items():

        def note(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and args[0].numel():
                shapes[name] = tuple(args[0].shape)

        handles.append(layer.register_forward_pre_hook(note))
    try:
        call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return shapes


def call(model: nn.Module, example: Inputs) -> object:
    """Calls a model with an example."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def left(name: str, layer: nn.Module, reason: str) -> Choice:
    """Returns what is said about a layer that stays dense."""
    return Choice(name, type(layer).__name__, sparsity_of(layer), False, reason)
