"""Replacing dense layers by sparse ones where that is faster with the shapes in use."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcram.kernels.cpu.library import has_int8
from torchcram.runtime.cpu.memory_format import is_channels_last
from torchcram.runtime.cpu.modules import PackedLayer, SparseConv2d, SparseLinear, SparseLinearInt8
from torchcram.runtime.cpu.ops.image_layout import images_innermost
from torchcram.runtime.cpu.packing import NOT_CUT, Geometry
from torchcram.runtime.cpu.reordered import can_reorder, reordered

Inputs = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Inputs of a model: a tensor, a tuple of arguments, or a mapping of keyword arguments."""

Tiles = tuple[int, int]
"""Numbers of tiles that an image is cut into, down and across."""

LayerTimes = Mapping[str, float]
"""Milliseconds of each way to run a layer."""

Timings = dict[str, LayerTimes]
"""Times of layers, by the description of the layer and its input."""

ChooseByImages = Callable[[Mapping[str, LayerTimes]], Set[str]]
"""Function from the times of all layers to the names of those that run on panels of images."""


class Rule(NamedTuple):
    """Requirements on a layer to become sparse without timing it.

    Attributes:
        sparsity: Minimum fraction of zeros in the weight.
        weights: Minimum number of weights, including zeros.
    """

    sparsity: float
    weights: int


# Such layers are about as fast as dense ones even with a single token or a single small image.
RULES = {"Linear": Rule(0.9, 2**19), "Conv2d": Rule(0.8, 2**15)}
_LEAST = 0.3  # sparsity below which a layer cannot become faster and is not timed
_MARGIN = 1.05  # speedup that a layer must reach by itself, to be faster in the model, too
_ROUNDS, _SECONDS = 15, 0.2  # limits for timing a layer or a model
_LEAST_ROUNDS = 5  # however long they take: with fewer, other load on the machine often decides
_FIRST_ROUNDS = 2  # in which a call takes part however slow it is
_HOPELESS = 2  # times the least time beyond which a call takes part in no further round
_MANY_IMAGES = 9  # images, or tiles, in a batch from which panels of images are tried


@dataclass(frozen=True)
class LayerInput:
    """Shape and memory layout of the input of a layer, for timing the layer.

    Attributes:
        shape: Shape of the input.
        stride: Strides of the input; None for a contiguous tensor.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None

    @classmethod
    def of(cls, x: Tensor) -> LayerInput:
        """Returns the description of a tensor."""
        return cls(tuple(x.shape), None if x.is_contiguous() else x.stride())

    def sample(self) -> Tensor:
        """Returns random numbers in the shape and memory layout of the input."""
        if self.stride is None:
            return torch.randn(self.shape)
        pairs = zip(self.shape, self.stride, strict=True)
        extent = 1 + sum((size - 1) * stride for size, stride in pairs)
        return torch.randn(extent).as_strided(self.shape, self.stride)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        if self.stride is None:
            return sizes
        x = torch.empty_strided(self.shape, self.stride, device="meta")
        channels_last = len(self.shape) == 4 and is_channels_last(x)
        return f"{sizes} ({'channels_last' if channels_last else 'not contiguous'})"


@dataclass(frozen=True)
class Choice:
    """What `prepare` did with a layer.

    Attributes:
        name: Name of the layer in the model.
        kind: Name of the class of the layer.
        sparsity: Fraction of zeros in its weight.
        sparse: Whether it runs on the sparse kernels now.
        reason: Reason for the choice, in words.
        dense_ms: Milliseconds of the dense layer; None if it was not timed.
        sparse_ms: Milliseconds on the sparse kernels; None if it was not timed.
    """

    name: str
    kind: str
    sparsity: float
    sparse: bool
    reason: str
    dense_ms: float | None = None
    sparse_ms: float | None = None

    def __str__(self) -> str:
        state = "sparse" if self.sparse else "dense"
        return f"{self.name} ({self.kind}, {self.sparsity:.1%} zeros): {state}, {self.reason}"


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers of `model` that may become sparse, by name; a shared layer once."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Conv2d)  # subclasses may compute something else
    }


def unsupported_reason(layer: nn.Module) -> str | None:
    """Returns why the kernels cannot run a layer, or None if they can."""
    weight = layer.weight
    if not isinstance(weight, Tensor) or weight.dtype != torch.float32:
        return f"its weight is {getattr(weight, 'dtype', 'no tensor')}, not float32"
    if weight.device.type != "cpu":
        return f"it is on {weight.device}, not on the CPU"
    if weight.numel() == 0:
        return "its weight is empty"
    if isinstance(layer, nn.Conv2d):
        if layer.groups != 1:
            return f"it has {layer.groups} groups"
        if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
            return f"its padding is {layer.padding!r} ({layer.padding_mode})"
    return None


def sparsity_of(layer: nn.Module) -> float:
    """Returns the fraction of zeros in the weight of a layer."""
    weight = layer.weight
    assert isinstance(weight, Tensor)  # noqa: S101
    return 1 - int(torch.count_nonzero(weight)) / max(weight.numel(), 1)


def sparse_version(
    layer: nn.Module, *, by_images: bool = False, int8: bool = False, tiles: Tiles = NOT_CUT
) -> nn.Module:
    """Returns the same layer on the sparse kernels.

    Args:
        layer: Linear or Conv2d layer.
        by_images: Whether a convolution uses panels of images.
        int8: Whether a Linear layer computes in 8 bits.
        tiles: Tiles of an image, down and across, that panels of images hold in place of images.
    """
    if isinstance(layer, nn.Linear):
        return (SparseLinearInt8 if int8 else SparseLinear)(layer.weight, layer.bias)
    assert isinstance(layer, nn.Conv2d)  # noqa: S101
    geometry, tiles = geometry_of(layer), tiles if by_images else NOT_CUT
    return SparseConv2d(layer.weight, layer.bias, geometry, by_images=by_images, tiles=tiles)


def geometry_of(layer: nn.Conv2d) -> Geometry:
    """Returns the geometry of a convolution."""
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    (a, b), (c, d), (e, f), (g, h) = (tuple(map(int, pair)) for pair in pairs)
    return Geometry((a, b), (c, d), (e, f), (g, h))


def choose_by_rule(
    name: str, layer: nn.Module, *, may_be_channels_last: bool, int8: bool = False
) -> tuple[Choice, nn.Module | None]:
    """Decides without timing; returns the choice, and the sparse layer or None.

    Args:
        name: Name of the layer.
        layer: Dense layer.
        may_be_channels_last: Whether convolutions of the model may receive inputs in the
            channels_last format; see `may_be_channels_last`.
        int8: Whether 8 bits are allowed.
    """
    kind, sparsity = type(layer).__name__, sparsity_of(layer)
    rule, weight = RULES[kind], layer.weight
    assert isinstance(weight, Tensor)  # noqa: S101
    problem = None
    if round(sparsity, 3) < rule.sparsity:  # the exact share is seldom a whole number of weights
        problem = f"fewer than {rule.sparsity:.0%} zeros"
    elif weight.numel() < rule.weights:
        problem = f"fewer than {rule.weights} weights"
    elif kind == "Conv2d" and may_be_channels_last:
        problem = "the model has grouped convolutions or weights in the channels_last format"
    if problem is not None:
        reason = f"{problem}, and nothing was measured without an example"
        return Choice(name, kind, sparsity, False, reason), None
    reason = f"at least {rule.sparsity:.0%} zeros and {rule.weights} weights; not measured"
    return Choice(name, kind, sparsity, True, reason), sparse_version(layer, int8=int8)


def may_be_channels_last(model: nn.Module) -> bool:
    """Returns whether convolutions of a model may receive inputs in the channels_last format.

    The sparse kernels transpose such inputs and outputs, which may cost more than they save. The
    format shows in the weights; models with grouped convolutions often permute dimensions
    themselves.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    return any(layer.groups > 1 for layer in layers) or any(
        is_channels_last(layer.weight) for layer in layers if type(layer) is nn.Conv2d
    )


def choose_by_timing(
    name: str,
    layer: nn.Module,
    received: LayerInput,
    times: LayerTimes,
    *,
    by_images: bool | None = None,
) -> tuple[Choice, nn.Module | None]:
    """Chooses the fastest way to run a layer; returns the choice, and the new layer if any.

    The weight of a layer that does not become sparse may be in the layout of oneDNN.

    Args:
        name: Name of the layer.
        layer: Dense layer.
        received: Shape and strides of its input.
        times: Milliseconds of each way, as `measure_layer` returns them.
        by_images: Whether a convolution of a graph runs on panels of images; None if it is not part
            of a graph, so that its own time decides.
    """
    kind, sparsity = type(layer).__name__, sparsity_of(layer)
    if not times:
        return Choice(name, kind, sparsity, False, f"fewer than {_LEAST:.0%} zeros"), None
    times = dict(times)
    dense_ms, reordered_ms = times.pop("dense"), times.pop("reordered", float("inf"))
    margin = _MARGIN if by_images is None else 1  # in a graph, oneDNN also computes what follows
    if margin * reordered_ms < dense_ms:
        dense, least = reordered(layer), reordered_ms
        note = f"oneDNN, which rearranges the weight once, is {dense_ms / least:.2f} times as fast"
    else:
        dense, least, note = None, dense_ms, ""
    if not times:
        reason = f"fewer than {_LEAST:.0%} zeros" + (note and f"; {note}")
        return Choice(name, kind, sparsity, False, reason, dense_ms), dense
    if by_images is False:
        times.pop("by_images", None)
    best = "by_images" if by_images else min(times, key=times.__getitem__)
    if times.get("int8", float("inf")) < 1.1 * times[best]:
        best = "int8"  # two neighbouring layers in 8 bits can be fused
    reason = (
        f"the sparse kernel alone is {least / times[best]:.2f} times as fast as dense on "
        f"{received} ({times[best]:.3g} ms, dense {least:.3g} ms)"
    )
    faster = _MARGIN * times[best] < least
    if not faster and not by_images:
        reason += f", less than the {_MARGIN} times that count as faster"
        reason += note and f"; {note}"
        return Choice(name, kind, sparsity, False, reason, least, times[best]), dense
    if not faster:
        reason += ", and no images are copied between it and the layers beside it"
    new = sparse_version(layer, by_images=best == "by_images", int8=best == "int8")
    return Choice(name, kind, sparsity, True, reason, least, times[best]), new


def measure_layer(
    layer: nn.Module,
    received: LayerInput,
    timings: Timings,
    *,
    int8: bool = False,
    innermost: bool = False,
    sparse: bool = True,
    tiles: Tiles = NOT_CUT,
) -> LayerTimes:
    """Times each way to run a layer with an input like its own.

    Args:
        layer: Dense layer.
        received: Shape and strides of its input.
        timings: Times measured so far; identical layers are timed once.
        int8: Whether 8 bits are allowed.
        innermost: Whether the inputs and outputs of panels of images have images as the innermost
            dimension already. Otherwise copying them is part of the time.
        sparse: Whether ways with sparse weights are timed.
        tiles: Tiles that panels of images hold in place of images.

    Returns:
        Milliseconds of each way: dense, reordered, sparse, by_images and int8, as far as they are
        possible. Ways with sparse weights are missing if there are too few zeros; nothing is timed
        if only the dense way is left.
    """
    sparse = sparse and (sparsity_of(layer) >= _LEAST or int8)
    if not sparse and not can_reorder():
        return {}
    alike = f"{layer} {received.shape} {received.stride} {sparsity_of(layer):.2f}"
    if alike not in timings:
        timings[alike] = _measure(
            layer, received, sparse=sparse, int8=int8, innermost=innermost, tiles=tiles
        )
    return timings[alike]


def _measure(
    layer: nn.Module,
    received: LayerInput,
    *,
    sparse: bool,
    int8: bool,
    innermost: bool,
    tiles: Tiles = NOT_CUT,
) -> LayerTimes:
    x = received.sample()
    work: dict[str, Callable[[], object]] = {"dense": functools.partial(layer, x)}
    if can_reorder():
        work["reordered"] = functools.partial(reordered(layer), x)
    if sparse:
        work["sparse"] = functools.partial(sparse_version(layer), x)
        if isinstance(layer, nn.Conv2d) and has_many_images(layer, tuple(x.shape), tiles):
            images = images_innermost(x, tiles) if innermost else x
            with suppress(ValueError):  # the kernel is too large for panels of images
                by_images = sparse_version(layer, by_images=True, tiles=tiles)
                work["by_images"] = functools.partial(by_images, images)
        if isinstance(layer, nn.Linear) and int8:
            work["int8"] = functools.partial(sparse_version(layer, int8=True), x)
    with torch.no_grad():
        return time_in_turns(work)


def has_many_images(layer: nn.Conv2d, shape: tuple[int, ...], tiles: Tiles) -> bool:
    """Returns whether a batch has enough images, or tiles of them, for panels of images."""
    if len(shape) != 4 or shape[0] * tiles[0] * tiles[1] < _MANY_IMAGES:
        return False
    return tiles == NOT_CUT or geometry_of(layer).fits_tiles((shape[2], shape[3]), tiles)


class ModelTimes(NamedTuple):
    """Milliseconds of a whole model.

    Attributes:
        dense: Milliseconds with dense layers.
        sparse: Milliseconds with sparse layers where these are faster.
    """

    dense: float
    sparse: float


def time_models(dense: Callable[[], object], sparse: Callable[[], object]) -> ModelTimes:
    """Times two ways to run a model."""
    return ModelTimes(**time_in_turns({"dense": dense, "sparse": sparse}))


def fastest(work: dict[str, Callable[[], object]]) -> str:
    """Returns the name of the call that takes the least time."""
    times = time_in_turns(work)
    return min(times, key=lambda name: times[name])


def time_in_turns(work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the least time of each call in milliseconds; the calls take turns.

    Calls that are far slower than another one take part in the first rounds only.
    """
    best = dict.fromkeys(work, float("inf"))
    end = None
    for turn in range(_ROUNDS + 1):
        if turn > _FIRST_ROUNDS:
            limit = _HOPELESS * min(best.values())
            work = {key: call for key, call in work.items() if best[key] <= limit}
        for key, call in work.items():
            start = time.perf_counter()
            call()
            if turn:  # the first turn is a warm-up
                best[key] = min(best[key], 1000 * (time.perf_counter() - start))
        end = end or time.perf_counter() + _SECONDS
        if turn >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
    return best


def replace_layers_(
    model: nn.Module,
    inputs: Mapping[str, LayerInput] | None = None,
    *,
    int8: bool = False,
    choose_by_images: ChooseByImages | None = None,
    sparse: bool = True,
    tiles: Tiles = NOT_CUT,
) -> list[Choice]:
    """Replaces layers by sparse ones where that is faster, in place; returns the choices.

    Args:
        model: Dense model.
        inputs: Inputs of the layers that the example reaches, by name, for timing; None to decide
            by `RULES`.
        int8: Whether 8 bits are allowed.
        choose_by_images: Function that chooses convolutions for panels of images in a graph, in
            which images stay the innermost dimension between such layers; see
            `torchcram.runtime.cpu.image_layouts`. None if the model is no graph.
        sparse: Whether layers may become sparse. Otherwise only the weights of dense layers are
            rearranged.
        tiles: Tiles that panels of images hold in place of images, in a graph.
    """
    int8 = int8 and has_int8()
    channels_last = inputs is None and may_be_channels_last(model)
    layers = candidates(model)
    problems = {name: _problem(name, layer, inputs) for name, layer in layers.items()}
    times: dict[str, LayerTimes] = {}
    if inputs is not None:
        innermost, timings = choose_by_images is not None, Timings()
        times = {
            name: measure_layer(
                *(layer, inputs[name], timings),
                int8=int8,
                innermost=innermost,
                sparse=sparse,
                tiles=tiles,
            )
            for name, layer in layers.items()
            if problems[name] is None
        }
    by_images = None if choose_by_images is None else choose_by_images(times)
    choices = []
    for name, layer in layers.items():
        problem = problems[name]
        if problem is not None:
            choices.append(dense_choice(name, layer, problem))
            continue
        new: nn.Module | None
        if inputs is None:
            choice, new = choose_by_rule(name, layer, may_be_channels_last=channels_last, int8=int8)
        else:
            panels = None if by_images is None else name in by_images
            choice, new = choose_by_timing(name, layer, inputs[name], times[name], by_images=panels)
        if new is not None:
            _replace_everywhere_(model, layer, new)
        choices.append(choice)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and any(
            isinstance(child, PackedLayer) for child in module.modules()
        ):
            # Its fast path would unpack the weights.
            module.activation_relu_or_gelu = 0
    return choices


def _problem(name: str, layer: nn.Module, inputs: Mapping[str, LayerInput] | None) -> str | None:
    """Returns why a layer stays dense whatever its times are, or None."""
    problem = unsupported_reason(layer)
    if problem is None and inputs is not None and name not in inputs:
        return "the example does not reach it"
    return problem


def _replace_everywhere_(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    for module in model.modules():
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new


def layer_inputs(model: nn.Module, example: Inputs) -> dict[str, LayerInput]:
    """Runs the example and returns the inputs of the layers of a model, by name."""
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


def dense_choice(name: str, layer: nn.Module, reason: str) -> Choice:
    """Returns the choice for a layer that stays dense."""
    return Choice(name, type(layer).__name__, sparsity_of(layer), False, reason)
