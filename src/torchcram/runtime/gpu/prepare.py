"""Compressed models on NVIDIA GPUs: torch's kernels, layer by layer, where they are faster."""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from torchcram.operators import as_operator
from torchcram.runtime.gpu.choice import Chooser, LayerChoice
from torchcram.runtime.gpu.rules import DTYPES
from torchcram.runtime.onnx.integers import find_integers, quantizer_of
from torchcram.weights import layer_weights, weights_in

if TYPE_CHECKING:
    from torchcram.operators import Operator
    from torchcram.runtime.onnx.integers import Integers
    from torchcram.weights import LayerWeights, Weights

__all__ = ["LayerChoice", "Prepared", "prepare_gpu"]


class Prepared(NamedTuple):
    """A model ready to run, and what was done to its layers."""

    model: nn.Module
    layers: tuple[LayerChoice, ...]


def prepare_gpu(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    operator: Operator | str | None = None,
    weights: Weights | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Prepared:
    """Returns a copy of `model` for the GPU, with layers replaced where that is measured faster.

    2:4 weights become semi-structured tensors; weights of up to 8 bits go through a kernel of our
    own, of up to 4 bits through torch._weight_int4pack_mm. The copy is in eval mode, computes in
    `dtype`, and cannot be trained.

    Args:
        model: compressed already; in float32 where it is quantized.
        example: inputs of the size that will be run, by position. What is fast depends on it.
        operator: what the model was compressed with, or its text; needed where it quantizes.
        weights: what was compressed; by default all `compressible_weights(model)`.
        dtype: bfloat16 or float16.

    Raises:
        ValueError: if there is no CUDA device, a weight is not what `operator` makes, or `dtype` is
            another one.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype}: allowed are {', '.join(map(str, DTYPES))}")
    if not torch.cuda.is_available():
        raise ValueError("prepare_gpu needs a CUDA device, and there is none")
    chosen = layer_weights(model) if weights is None else weights_in(model, weights)
    integers = _integers(model, chosen, operator)
    owners = layers_of(model, chosen)
    twin = copy.deepcopy(model).to("cuda", dtype).eval().requires_grad_(False)
    counts = count_rows(twin, tuple(_to_gpu(value, dtype) for value in example))
    chooser, choices = Chooser(), []
    for path, name in owners.items():
        layer = twin.get_submodule(path)
        reason = why_left(path, layer, counts)
        if reason is not None or not isinstance(layer, nn.Linear):
            choices.append(LayerChoice(path, "dense", None, str(reason)))
            continue
        found = integers.get(name)
        choice, faster = chooser.choose(path, layer, counts[path], integers=found)
        choices.append(choice)
        if faster is not None:
            twin = _replaced(twin, path, faster)
    for name in chosen:
        if name in owners.values():
            continue
        layer = model.get_submodule(name.rpartition(".")[0])  # attention, say, or an LSTM
        choices.append(LayerChoice(name, "dense", None, str(why_left(name, layer, counts))))
    return Prepared(twin, tuple(choices))


def layers_of(model: nn.Module, weights: Weights) -> dict[str, str]:
    """Returns which layers use which weights: a tied one has several."""
    names = {id(weight): name for name, weight in weights.items()}
    return {
        path: names[id(module._parameters["weight"])]
        for path, module in model.named_modules()
        if id(module._parameters.get("weight")) in names
    }


@torch.no_grad()
def count_rows(model: nn.Module, example: tuple[Tensor, ...]) -> dict[str, int]:
    """Returns how many rows the input of every Linear layer has, the most where it runs often."""
    counts: dict[str, int] = {}

    def count(path: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        rows = inputs[0].numel() // inputs[0].shape[-1]
        counts[path] = max(counts.get(path, 0), rows)

    hooks = [
        module.register_forward_pre_hook(partial(count, path))
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        model(*example)
    finally:
        for hook in hooks:
            hook.remove()
    return counts


def why_left(path: str, layer: nn.Module, counts: dict[str, int]) -> str | None:
    """Returns why a layer is not looked at any further; None where it is."""
    if not isinstance(layer, nn.Linear):
        return f"a {type(layer).__name__}: torch has kernels for Linear alone"
    if type(layer).forward is not nn.Linear.forward:
        return f"{type(layer).__name__} has a forward of its own"
    if not counts.get(path):
        return "never called on the example"
    return None


def _integers(
    model: nn.Module, weights: LayerWeights, operator: Operator | str | None
) -> dict[str, Integers]:
    quantize = quantizer_of(None if operator is None else as_operator(operator))
    if quantize is None:
        return {}
    linear = {id(one.weight) for one in model.modules() if isinstance(one, nn.Linear)}
    found = {
        name: find_integers(weights, name, quantize)
        for name, weight in weights.items()
        if id(weight) in linear
    }
    return {
        name: one._replace(values=one.values.cuda(), scale=one.scale.cuda())
        for name, one in found.items()
    }


def _replaced(model: nn.Module, path: str, layer: nn.Module) -> nn.Module:
    if not path:  # the model is the layer
        return layer
    model.set_submodule(path, layer)
    return model


def _to_gpu(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to("cuda", dtype if value.is_floating_point() else value.dtype)
