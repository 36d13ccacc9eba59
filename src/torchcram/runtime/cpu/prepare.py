"""`prepare`: a copy of a model whose sparse layers run on the CPU kernels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcram.kernels.cpu.library import available
from torchcram.runtime.cpu.fuse import as_graph, fuse_encoder_
from torchcram.runtime.cpu.image_ways import fastest_for_images
from torchcram.runtime.cpu.modules import PackedLayer
from torchcram.runtime.cpu.prepared_graph import prepared_graph_
from torchcram.runtime.cpu.reordered import ReorderedConv2d, ReorderedLinear
from torchcram.runtime.cpu.replace_layers import (
    Choice,
    Inputs,
    call,
    candidates,
    dense_choice,
    layer_inputs,
    replace_layers_,
    time_models,
)
from torchcram.runtime.cpu.reports import (
    original_names,
    renamed,
    report,
    stays_dense,
    with_report,
)
from torchcram.runtime.marking import mark_prepared_
from torchcram.runtime.outputs import output_error, outputs_close
from torchcram.weights import layer_weights

if TYPE_CHECKING:
    from collections.abc import Callable

_CLOSE, _CLOSE_INT8 = 2e-5, 0.1  # of the largest output: rounding errors only
_AS_EXACT, _ROUGH = 4, 0.01  # times the error of the dense model, which must be small itself
_FEW_ZEROS = 0.65  # mean sparsity of sparse layers below which dense layers may be faster


def prepare(
    model: nn.Module,
    example_inputs: Inputs | None = None,
    *,
    fuse: bool = True,
    int8: bool = False,
) -> nn.Module:
    """Returns a copy of `model` in eval mode that skips the zeros in its weights on the CPU.

    Linear and Conv2d layers get sparse kernels where that is faster. With an example, each layer is
    timed with the shapes and memory formats in use, and then the model as a whole, which stays
    dense if it does not get faster. Without an example nothing is timed, and only layers that are
    large and sparse enough to be faster with any input become sparse. `report` tells what was done
    with each layer, and why. If the kernels have not been built, all layers stay dense.

    With an example, a model that `torch.fx` can trace is also fused: batch norms are folded into
    convolutions, and sparse layers compute the activation and the addition that follow them. The
    outputs for the example are compared with those of the model; if they differ, it is not fused.

    Args:
        model: Model with compressed weights; it stays unchanged.
        example_inputs: Inputs that the model is called with: a tensor, a tuple of arguments, or a
            mapping of keyword arguments. Kernels are chosen for their batch size and shape; other
            inputs work, too.
        fuse: Whether to fuse operations into sparse layers.
        int8: Whether Linear layers may compute in 8 bits if there are kernels for it (AVX-512
            VNNI, NEON). Weights are rounded per output and activations per token, which changes
            outputs by about 1 %.
    """
    fast = copy.deepcopy(model).eval().requires_grad_(False)
    if "" in candidates(fast):  # a model that is a single layer cannot be changed in place
        fast = nn.Sequential(fast)
    others = _without_kernel(fast)
    if not available():
        choices = [
            dense_choice(name, layer, "no kernels") for name, layer in candidates(fast).items()
        ]
        return with_report(fast, [*choices, *others])
    if example_inputs is None:
        choices = replace_layers_(fast, int8=int8)
        mark_prepared_(fast, model)
        return with_report(fast, [*choices, *others])
    with torch.no_grad():
        fast = _prepared(fast, example_inputs, fuse=fuse, int8=int8)
    mark_prepared_(fast, model)
    return with_report(fast, [*report(fast), *renamed(others, fast)])


def _without_kernel(model: nn.Module) -> list[Choice]:
    """Returns the choices for weights of layers without a kernel; all of them stay dense."""
    choices = []
    known = {id(layer._parameters.get("weight")) for layer in candidates(model).values()}
    for name, weight in layer_weights(model).items():
        if id(weight) in known:
            continue
        path, _, parameter = name.rpartition(".")
        kind = type(model.get_submodule(path)).__name__
        zeros = 1 - int(torch.count_nonzero(weight)) / max(weight.numel(), 1)
        label = path if parameter == "weight" else name
        choices.append(Choice(label, kind, zeros, False, f"there is no kernel for {kind} layers"))
    return choices


def _prepared(dense: nn.Module, example: Inputs, *, fuse: bool, int8: bool) -> nn.Module:
    """Returns the fastest model that has the outputs of `dense` for the example."""
    expected = call(dense, example)
    exact = cache(partial(_in_float64, dense, example))

    def agrees(other: nn.Module, *, int8: bool) -> bool:
        try:
            actual = call(other, example)
        except Exception:  # noqa: BLE001  a model that does not run is not used, whatever the reason
            return False
        if outputs_close(expected, actual, _CLOSE_INT8 if int8 else _CLOSE):
            return True
        if int8 or exact() is None:
            return False
        return output_error(exact(), actual) <= _AS_EXACT * output_error(exact(), expected) < _ROUGH

    same = partial(agrees, int8=int8)
    fused = _fused(dense, example, expected, same, int8=int8) if fuse else None
    if fused is not None and not _slower(dense, fused, example):
        return fused
    inputs = layer_inputs(dense, example)
    for eight in (True, False) if int8 else (False,):
        fast = copy.deepcopy(dense)
        choices = replace_layers_(fast, inputs, int8=eight)
        if agrees(fast, int8=eight):
            break
    else:
        why = "the outputs differ"
        return with_report(dense, [stays_dense(choice, why) for choice in choices])
    encoder = copy.deepcopy(fast)
    if fuse and fuse_encoder_(encoder) and agrees(encoder, int8=eight):
        fast = encoder
    new = (PackedLayer, ReorderedLinear, ReorderedConv2d)
    changed = any(isinstance(layer, new) for layer in fast.modules())
    slower = changed and _slower(dense, fast, example)
    if slower:
        return with_report(dense, [stays_dense(choice, slower) for choice in choices])
    return with_report(fast, choices)


def _in_float64(model: nn.Module, example: Inputs) -> object | None:
    """Returns the outputs of a model in float64, or None if it does not run in float64.

    Deep models may amplify rounding errors, so that their outputs depend on the order of sums.
    """
    try:
        return call(copy.deepcopy(model).double(), _as_double(example))
    except Exception:  # noqa: BLE001  such as an operator without float64
        return None


def _as_double(inputs: Any) -> Any:  # noqa: ANN401
    if isinstance(inputs, Tensor):
        return inputs.double() if inputs.is_floating_point() else inputs
    if isinstance(inputs, Mapping):
        return {name: _as_double(value) for name, value in inputs.items()}
    return tuple(map(_as_double, inputs)) if isinstance(inputs, tuple) else inputs


def _slower(dense: nn.Module, sparse: nn.Module, example: Inputs) -> str:
    """Returns why a model with sparse layers does not pay, or an empty string if it does."""
    times = time_models(partial(call, dense, example), partial(call, sparse, example))
    if times.sparse < times.dense:
        return ""
    return (
        "the model as a whole is not faster with its sparse layers "
        f"({times.sparse:.3g} ms, dense {times.dense:.3g} ms)"
    )


def _fused(
    dense: nn.Module,
    example: Inputs,
    expected: object,
    agrees: Callable[[nn.Module], bool],
    *,
    int8: bool,
) -> nn.Module | None:
    """Returns the fastest graph that has the outputs of `dense`, or None if there is none.

    Args:
        dense: Model with dense layers.
        example: Inputs that the model is called with.
        expected: Outputs of the model for the example.
        agrees: Function that tells whether a model has these outputs.
        int8: Whether Linear layers may compute in 8 bits.
    """
    graph = as_graph(copy.deepcopy(dense))
    if graph is None:
        return None
    fast: nn.Module | None
    if isinstance(example, Tensor) and _is_one_per_image(example, expected):
        fast = fastest_for_images(graph, example, agrees, int8=int8)
    else:
        fast = prepared_graph_(graph, example, int8=int8)
        fast = fast if fast is not None and agrees(fast) else None
    if fast is None:
        return None
    zeros = [choice.sparsity for choice in report(fast) if choice.sparse]
    if zeros and sum(zeros) / len(zeros) < _FEW_ZEROS:
        return _unless_dense_is_faster(fast, dense, example, agrees)
    return fast


def _is_one_per_image(example: Tensor, outputs: object) -> bool:
    """Returns whether there seems to be one output for each image of an example."""
    images = example.dim() == 4
    return images and isinstance(outputs, Tensor) and outputs.shape[:1] == example.shape[:1]


def _unless_dense_is_faster(
    fast: nn.Module, dense: nn.Module, example: Inputs, agrees: Callable[[nn.Module], bool]
) -> nn.Module:
    """Returns a graph with sparse layers, or one with dense layers if that takes less time.

    A layer is timed with its weight in the caches. In a large model all weights are read from
    memory, and the sum of the layers' times says too little about the model.
    """
    graph = as_graph(copy.deepcopy(dense))
    other = None if graph is None else prepared_graph_(graph, example, int8=False, sparse=False)
    if other is None or not agrees(other):
        return fast
    why = _slower(other, fast, example)
    if not why:
        return fast
    return with_report(other, [stays_dense(choice, why) for choice in original_names(fast)])
