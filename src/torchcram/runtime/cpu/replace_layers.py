"""Exchanging the layers of a model for sparse ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from torchcram.kernels.cpu.library import has_int8
from torchcram.runtime.cpu.candidates import (
    Choice,
    LayerInput,
    Races,
    by_measure,
    by_rule,
    candidates,
    may_be_channels_last,
    sparsity_of,
    unsupported_reason,
)
from torchcram.runtime.cpu.modules import PackedLayer

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a model is called with: a tensor, arguments, or keyword arguments."""


def replace_layers_(
    model: nn.Module,
    inputs: Mapping[str, LayerInput] | None = None,
    *,
    int8: bool = False,
    innermost: bool = False,
) -> list[Choice]:
    """Gives layers sparse kernels where it pays, in place; returns what was done.

    Args:
        model: Dense model.
        inputs: Inputs of the layers that are reached, to time the layers with; None goes by a rule.
        int8: Whether 8 bits are allowed.
        innermost: Whether neighbouring layers for panels of images hand each other images
            innermost, as `torchcram.runtime.cpu.fuse.lay_images_innermost_` makes them do.
    """
    int8 = int8 and has_int8()
    channels_last = inputs is None and may_be_channels_last(model)
    races: Races = {}
    choices = []
    for name, layer in candidates(model).items():
        problem = unsupported_reason(layer)
        if problem is None and inputs is not None and name not in inputs:
            problem = "the example does not reach it"
        if problem is not None:
            choices.append(left(name, layer, problem))
            continue
        new: nn.Module | None
        if inputs is None:
            choice, new = by_rule(name, layer, may_be_channels_last=channels_last, int8=int8)
        else:
            choice, new = by_measure(
                name, layer, inputs[name], races=races, int8=int8, innermost=innermost
            )
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


def layer_inputs(model: nn.Module, example: Inputs) -> dict[str, LayerInput]:
    """Runs the example and returns what the layers of a model receive, by name."""
    inputs: dict[str, LayerInput] = {}
    handles = []
    for name, layer in candidates(model).items():

        def note(_: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if args and isinstance(args[0], Tensor) and args[0].numel():
                inputs[name] = LayerInput.of(args[0])

        handles.append(layer.register_forward_pre_hook(note))
    try:
        call(model, example)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def call(model: nn.Module, example: Inputs) -> object:
    """Calls a model with an example."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def left(name: str, layer: nn.Module, reason: str) -> Choice:
    """Returns what is said about a layer that stays dense."""
    return Choice(name, type(layer).__name__, sparsity_of(layer), False, reason)
