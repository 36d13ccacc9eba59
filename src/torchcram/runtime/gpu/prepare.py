"""`prepare_gpu`: a copy of a model whose layers run on the fastest kernels of a GPU."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from torchcram.operators import as_operator
from torchcram.operators.quantize import quantizer_of
from torchcram.runtime.gpu.layers import (
    DTYPES,
    Int4Linear,
    Int8Linear,
    sparse_conv,
    sparse_linear,
    why_not_int4,
    why_not_int8,
    why_not_pointwise,
    why_not_sparse,
)
from torchcram.runtime.gpu.run_modes import DENSE, RunMode, choose_mode
from torchcram.runtime.integers import find_integers
from torchcram.runtime.marking import mark_prepared_
from torchcram.runtime.outputs import tensor_error
from torchcram.weights import layer_weights, weights_in

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchcram.operators import Operator
    from torchcram.runtime.integers import Integers
    from torchcram.weights import LayerWeights, Weights

__all__ = ["LayerChoice", "Prepared", "RunMode", "prepare_gpu"]

Layer = nn.Linear | nn.Conv2d
FORWARDS = (nn.Linear.forward, nn.Conv2d.forward)  # of layers that may be replaced


class Input(NamedTuple):
    """What the time of a layer depends on, beside the layer.

    Attributes:
        shape: Shape of the input; (rows, inputs) for a Linear layer, whatever its dimensions are.
        channels_last: Whether the channels of an image are next to each other in memory.
    """

    shape: tuple[int, ...]
    channels_last: bool = False

    def like(self, weight: Tensor) -> Tensor:
        """Returns a random input with the device and the dtype of a weight."""
        x = torch.randn(self.shape, device=weight.device, dtype=weight.dtype)
        return x.to(memory_format=torch.channels_last) if self.channels_last else x

    def __str__(self) -> str:
        if len(self.shape) == 2:
            return f"{self.shape[0]} rows"
        return " x ".join(map(str, (*self.shape[:-3], *self.shape[-2:]))) + " pixels"


LEAST = 1.05  # speedup that a layer must reach to be replaced
TOLERANCE = 0.02  # error of outputs in 16 bits, as a fraction of the largest
CACHE = 128 * 2**20  # bytes; more than the caches of a GPU hold
MOST = 64  # maximum number of copies of a layer
BUDGET = 30.0  # milliseconds of a measurement


@dataclass(frozen=True)
class LayerChoice:
    """The kernel of a layer, and the reason for it.

    Attributes:
        name: Name of the layer.
        kernel: Kernel of the layer: "dense", "2:4", "int8" or "int4".
        speedup: Speedup of the fastest kernel over dense on the real shape; None if none was timed.
        reason: Reason for the choice, in words.
    """

    name: str
    kernel: str
    speedup: float | None
    reason: str


class Prepared(NamedTuple):
    """A prepared model.

    Attributes:
        model: Model on the GPU, in eval mode.
        layers: Kernel of every compressed layer, and the reason for it.
        mode: Mode in which the model runs: eager, unless `compile_model` found a faster one.
    """

    model: nn.Module
    layers: tuple[LayerChoice, ...]
    mode: RunMode = RunMode()


def prepare_gpu(
    model: nn.Module,
    example: tuple[Tensor, ...],
    *,
    operator: Operator | str | None = None,
    weights: Weights | None = None,
    dtype: torch.dtype = torch.bfloat16,
    compile_model: bool = False,
) -> Prepared:
    """Returns a copy of `model` on the GPU, with layers replaced where that is measured faster.

    2:4 weights become semi-structured tensors, in Linear layers and in convolutions of 1x1. Linear
    weights of up to 8 bits run on a Triton kernel, and of up to 4 bits on
    torch._weight_int4pack_mm. The copy is in eval mode, computes in `dtype`, and cannot be trained.

    Args:
        model: Compressed model, which stays unchanged; in float32 if it is quantized.
        example: Positional inputs of the size that will be run, which decides what is fast.
        operator: Operator that the model was compressed with, or its text; needed if it quantizes.
        weights: Weights that were compressed; by default all `compressible_weights(model)`.
        dtype: Dtype to compute in: bfloat16 or float16.
        compile_model: Whether to look for the fastest way to run the model as a whole, which takes
            a minute or more: eager, compiled, captured as a CUDA graph or both, each with replaced
            layers and all dense.

    Raises:
        ValueError: If there is no CUDA device, a weight is not what `operator` makes, or `dtype` is
            not allowed.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    if not torch.cuda.is_available():
        raise ValueError("prepare_gpu needs a CUDA device, but none is available")
    chosen = layer_weights(model) if weights is None else weights_in(model, weights)
    integers = _integers(model, chosen, operator)
    owners = weight_names_by_layer(model, chosen)
    twin = copy.deepcopy(model).to("cuda", dtype).eval().requires_grad_(False)
    inputs = tuple(_to_gpu(value, dtype) for value in example)
    seen = layer_inputs(twin, inputs)
    chooser, choices = Chooser(), []
    replaced: dict[str, nn.Module] = {}
    for path, name in owners.items():
        layer = twin.get_submodule(path)
        reason = why_dense(path, layer, seen)
        if reason is not None or not isinstance(layer, (nn.Linear, nn.Conv2d)):
            choices.append(LayerChoice(path, "dense", None, str(reason)))
            continue
        choice, faster = chooser.choose(path, layer, seen[path], integers=integers.get(name))
        choices.append(choice)
        if faster is not None:
            replaced[path] = faster
    for name in chosen:
        if name in owners.values():
            continue
        layer = model.get_submodule(name.rpartition(".")[0])  # such as attention or an LSTM
        choices.append(LayerChoice(name, "dense", None, str(why_dense(name, layer, seen))))
    if not compile_model:
        fast = _with_layers(twin, replaced)
        mark_prepared_(fast, model)
        return Prepared(fast, tuple(choices))
    shared = {id(each): each for each in (*twin.parameters(), *twin.buffers())}  # no second copy
    models = {"": _with_layers(copy.deepcopy(twin, shared), replaced)} if replaced else {}
    models[DENSE if replaced else ""] = twin
    fastest, mode = choose_mode(models, inputs)
    if mode.name.startswith(DENSE):
        choices = [_dense_after_all(choice) for choice in choices]
    return Prepared(fastest, tuple(choices), mode)


def weight_names_by_layer(model: nn.Module, weights: Weights) -> dict[str, str]:
    """Returns the weight name of each layer by the path of the layer; weights may be tied."""
    names = {id(weight): name for name, weight in weights.items()}
    return {
        path: names[id(module._parameters["weight"])]
        for path, module in model.named_modules()
        if id(module._parameters.get("weight")) in names
    }


@torch.no_grad()
def layer_inputs(model: nn.Module, example: tuple[Tensor, ...]) -> dict[str, Input]:
    """Returns the input of every Linear layer and convolution; the largest if it has several."""
    largest: dict[str, Input] = {}

    def note(
        path: str, layer: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Tensor]
    ) -> None:
        x = inputs[0] if inputs else named["input"]
        if isinstance(layer, nn.Linear):
            given = Input((x.numel() // x.shape[-1], x.shape[-1]))
        else:
            adjacent = x.dim() == 4 and x.stride(1) == 1 and not x.is_contiguous()
            given = Input(tuple(x.shape), adjacent)
        largest[path] = max(largest.get(path, given), given, key=lambda each: math.prod(each.shape))

    hooks = [
        module.register_forward_pre_hook(partial(note, path), with_kwargs=True)
        for path, module in model.named_modules()
        if type(module).forward in FORWARDS
    ]
    try:
        model(*example)
    finally:
        for hook in hooks:
            hook.remove()
    return largest


def why_dense(path: str, layer: nn.Module, seen: Mapping[str, Input]) -> str | None:
    """Returns why a layer is left dense without timing it, or None."""
    if not isinstance(layer, (nn.Linear, nn.Conv2d)):
        return f"a {type(layer).__name__}: there are kernels for Linear and 1x1 Conv2d only"
    if type(layer).forward not in FORWARDS:
        return f"{type(layer).__name__} has a forward of its own"
    if path not in seen:
        return "never called on the example"
    if not math.prod(seen[path].shape):
        return "its input is empty in the example"
    return None


def _integers(
    model: nn.Module, weights: LayerWeights, operator: Operator | str | None
) -> dict[str, Integers]:
    quantize = quantizer_of(None if operator is None else as_operator(operator))
    if quantize is None:
        return {}
    linear = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Linear)}
    integers = {
        name: find_integers(weights, name, quantize)
        for name, weight in weights.items()
        if id(weight) in linear
    }
    return {
        name: each._replace(values=each.values.cuda(), scale=each.scale.cuda())
        for name, each in integers.items()
    }


def _with_layers(model: nn.Module, layers: dict[str, nn.Module]) -> nn.Module:
    """Replaces layers by their paths; returns the model, or the layer that is all of it."""
    for path, layer in layers.items():
        if not path:
            return layer
        model.set_submodule(path, layer)
    return model


def _dense_after_all(choice: LayerChoice) -> LayerChoice:
    if choice.kernel == "dense":
        return choice
    reason = f"{choice.reason}, but the model as a whole is faster dense"
    return LayerChoice(choice.name, "dense", choice.speedup, reason)


def _to_gpu(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to("cuda", dtype if value.is_floating_point() else value.dtype)


# The fastest kernel of a layer


class Kernel(NamedTuple):
    """A way to run a layer.

    Attributes:
        why_not: Reason why it does not fit the layer; None if it does.
        make: Function that makes the layer.
    """

    why_not: str | None
    make: Callable[[], nn.Module]


class Chooser:
    """Chooses the kernels of layers; layers of the same shape are timed once."""

    def __init__(self) -> None:
        self._times: dict[tuple[object, ...], float | None] = {}

    @torch.no_grad()
    def choose(
        self, name: str, layer: Layer, given: Input, *, integers: Integers | None
    ) -> tuple[LayerChoice, nn.Module | None]:
        """Returns the choice for a layer, and the layer to replace it with or None.

        Args:
            name: Name of the layer.
            layer: Dense layer on the GPU.
            given: Its input.
            integers: Integers and scales of its weight on the GPU; None if it is not quantized.
        """
        kernels = kernels_for(layer, integers)
        usable = {kind: kernel for kind, kernel in kernels.items() if kernel.why_not is None}
        if not usable:
            reasons = dict.fromkeys(str(kernel.why_not) for kernel in kernels.values())
            return LayerChoice(name, "dense", None, "; ".join(reasons)), None
        dense = self._time("dense", partial(copy.deepcopy, layer), layer, given)
        times = {
            kind: self._time(kind, kernel.make, layer, given) for kind, kernel in usable.items()
        }
        speedups = {
            kind: dense / time
            for kind, time in times.items()
            if time is not None and dense is not None
        }
        if not speedups:
            reason = f"{', '.join(usable)}: fails on this GPU, or computes other outputs"
            return LayerChoice(name, "dense", None, reason), None
        best = max(speedups, key=speedups.__getitem__)
        measured = ", ".join(f"{kind} {value:.2f} x dense" for kind, value in speedups.items())
        reason = f"{measured}, at {given}"
        if speedups[best] < LEAST:
            return LayerChoice(name, "dense", speedups[best], reason), None
        made = usable[best].make()
        if not same_outputs(made, layer, given):  # another layer of this shape was timed
            reason = f"{best} computes other outputs with these weights"
            return LayerChoice(name, "dense", speedups[best], reason), None
        return LayerChoice(name, best, speedups[best], reason), made

    def _time(
        self, kind: str, make: Callable[[], nn.Module], layer: Layer, given: Input
    ) -> float | None:
        weight = layer.weight
        stride = layer.stride if isinstance(layer, nn.Conv2d) else None
        key = (kind, weight.shape, weight.dtype, layer.bias is None, stride, given)
        if key not in self._times:
            self._times[key] = _milliseconds(make, layer, given)
        return self._times[key]


def kernels_for(layer: Layer, integers: Integers | None) -> dict[str, Kernel]:
    """Returns all kernels by name, with a reason for each that does not fit the layer."""
    if isinstance(layer, nn.Conv2d):
        why_not = why_not_pointwise(layer)
        if why_not is None:
            why_not = why_not_sparse(layer.weight.detach().flatten(1), layer.weight.dtype)
        return {"2:4": Kernel(why_not, partial(sparse_conv, layer))}
    weight, bias, dtype = layer.weight.detach(), layer.bias, layer.weight.dtype
    sparse = Kernel(why_not_sparse(weight, dtype), partial(sparse_linear, weight, bias))
    if integers is None:
        return {"2:4": sparse, "integers": Kernel("not quantized", partial(copy.deepcopy, layer))}
    int8 = Kernel(why_not_int8(integers, dtype), partial(Int8Linear, integers, bias))
    int4 = Kernel(why_not_int4(integers, dtype), partial(Int4Linear, integers, bias))
    return {"2:4": sparse, "int8": int8, "int4": int4}


def _milliseconds(make: Callable[[], nn.Module], layer: Layer, given: Input) -> float | None:
    """Times a layer; returns None if it fails on this GPU or computes other outputs."""
    weight = layer.weight
    try:
        first = make()
        if not same_outputs(first, layer, given):
            return None
        count = count_copies(weight.numel() * weight.element_size())
        copies = [first, *(make() for _ in range(count - 1))]
        x = given.like(layer.weight)
        return gpu_milliseconds([partial(each, x) for each in copies])
    except Exception:  # noqa: BLE001  no kernel in this torch or for this GPU, or it does not compile
        return None


def same_outputs(made: nn.Module, layer: Layer, given: Input) -> bool:
    """Returns whether a layer agrees with the dense one on a random input, up to rounding."""
    x = given.like(layer.weight)
    return agree(made(x), layer(x))


def agree(actual: Tensor, expected: Tensor) -> bool:
    """Returns whether two outputs in 16 bits agree up to rounding."""
    return tensor_error(expected, actual).relative <= TOLERANCE


# Time on the GPU alone


def count_copies(weight_bytes: int) -> int:
    """Returns the number of copies of a layer to run in turn, so that weights come from memory.

    They do in a model, too: until a layer runs again, the other layers have filled the caches.
    """
    return max(1, min(MOST, -(-CACHE // max(weight_bytes, 1))))


@torch.no_grad()
def gpu_milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Returns the GPU time of a call: the median over replays of all calls as a CUDA graph.

    Args:
        calls: Functions to run one after another. If a single call exceeds the budget, only that
            call is timed, without a graph.
    """
    calls[0]()  # compiles and tunes
    torch.cuda.synchronize()
    first = _elapsed(calls[0])
    if first > BUDGET:
        return first
    calls = calls[: max(1, int(BUDGET / max(first, 1e-3)))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    replay = _elapsed(graph.replay)
    repeats = max(3, min(20, int(BUDGET / max(replay, 1e-3))))
    return statistics.median(_elapsed(graph.replay) for _ in range(repeats)) / len(calls)


def _elapsed(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
