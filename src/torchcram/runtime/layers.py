"""Which layers there are kernels for, and whether these pay: measured on the shapes in use."""

from __future__ import annotations

import functools
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchcram.runtime.int8 import SparseLinearInt8
from torchcram.runtime.modules import SparseConv2d, SparseLinear
from torchcram.runtime.packing import Geometry

if TYPE_CHECKING:
    from collections.abc import Callable

Races = dict[str, dict[str, float]]
"""The milliseconds of each way to run a layer, by its description."""

_RULE = {"Linear": 0.6, "Conv2d": 0.7}  # sparsity from which they pay, where nothing is measured
_LEAST = 0.3  # sparsity below which nothing is measured: there is nothing to gain
_MARGIN = 1.05  # a layer alone may win by less and lose among others
_ROUNDS, _SECONDS = 15, 0.2  # of measuring one layer, at most
_MANY_IMAGES = 9  # from here on their panels may pay


@dataclass(frozen=True)
class Choice:
    """What was done with one layer.

    Attributes:
        name: of the layer in the model.
        kind: the name of its class.
        sparsity: of its weight.
        sparse: whether it runs on the sparse kernels now.
        reason: why, or why not.
        dense_ms: how long it takes dense, where that was measured.
        sparse_ms: how long it takes on the sparse kernels.
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
    """Returns the layers of `model` that might get sparse weights, by name; a shared one once."""
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) in (nn.Linear, nn.Conv2d)  # subclasses may do more
    }


def obstacle(layer: nn.Module) -> str | None:
    """Returns why the kernels cannot run a layer, or None where they can."""
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


def sparse_version(layer: nn.Module, *, by_images: bool = False, int8: bool = False) -> nn.Module:
    """Returns the same layer on the sparse kernels."""
    if isinstance(layer, nn.Linear):
        return (SparseLinearInt8 if int8 else SparseLinear)(layer.weight, layer.bias)
    assert isinstance(layer, nn.Conv2d)  # noqa: S101
    return SparseConv2d(layer.weight, layer.bias, geometry_of(layer), by_images=by_images)


def geometry_of(layer: nn.Conv2d) -> Geometry:
    """Returns the geometry of a convolution."""
    pairs = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    (a, b), (c, d), (e, f), (g, h) = (tuple(map(int, pair)) for pair in pairs)
    return Geometry((a, b), (c, d), (e, f), (g, h))


def by_rule(name: str, layer: nn.Module, *, int8: bool = False) -> tuple[Choice, nn.Module | None]:
    """Decides by sparsity alone; returns the new layer where there is one."""
    kind, sparsity = type(layer).__name__, sparsity_of(layer)
    least = _RULE[kind]
    if sparsity < least:
        return Choice(name, kind, sparsity, False, f"fewer than {least:.0%} zeros"), None
    choice = Choice(name, kind, sparsity, True, f"at least {least:.0%} zeros; not measured")
    return choice, sparse_version(layer, int8=int8)


def by_measure(
    name: str, layer: nn.Module, shape: tuple[int, ...], *, races: Races, int8: bool = False
) -> tuple[Choice, nn.Module | None]:
    """Times a layer on an input of `shape`, dense and sparse, and returns the faster if sparse.

    Args:
        name: of the layer.
        layer: dense.
        shape: of its input.
        races: what has been measured before; layers alike are measured once.
        int8: whether 8 bits are allowed.
    """
    kind, sparsity = type(layer).__name__, sparsity_of(layer)
    if sparsity < _LEAST and not int8:
        return Choice(name, kind, sparsity, False, f"fewer than {_LEAST:.0%} zeros"), None
    alike = f"{layer} {shape} {sparsity:.2f}"
    if alike not in races:
        races[alike] = _measure(layer, shape, int8=int8)
    times = dict(races[alike])
    dense_ms = times.pop("dense")
    best = min(times, key=times.__getitem__)
    if times.get("int8", float("inf")) < 1.1 * times[best]:
        best = "int8"  # neighbours that compute alike can be fused
    pays = _MARGIN * times[best] < dense_ms
    what = f"{dense_ms / times[best]:.2f} times as fast as dense on {'x'.join(map(str, shape))}"
    choice = Choice(name, kind, sparsity, pays, what, dense_ms, times[best])
    new = sparse_version(layer, by_images=best == "by_images", int8=best == "int8")
    return choice, new if pays else None


def _measure(layer: nn.Module, shape: tuple[int, ...], *, int8: bool = False) -> dict[str, float]:
    x = torch.randn(shape)
    work: dict[str, Callable[[], object]] = {
        "dense": functools.partial(layer, x),
        "sparse": functools.partial(sparse_version(layer), x),
    }
    if isinstance(layer, nn.Conv2d) and len(shape) == 4 and shape[0] >= _MANY_IMAGES:
        innermost = x.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)
        with suppress(ValueError):  # a kernel that is too large for panels of images
            work["by_images"] = functools.partial(sparse_version(layer, by_images=True), innermost)
    if isinstance(layer, nn.Linear) and int8:
        work["int8"] = functools.partial(sparse_version(layer, int8=True), x)
    with torch.no_grad():
        return _race(work)


def is_faster(dense: Callable[[], object], other: Callable[[], object]) -> bool:
    """Returns whether the other of two ways to run a model takes less time."""
    times = _race({"dense": dense, "sparse": other})
    return times["sparse"] < times["dense"]


def _race(work: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Returns the least time of each in milliseconds; they take turns."""
    best = dict.fromkeys(work, float("inf"))
    end = None
    for turn in range(_ROUNDS + 1):
        for key, call in work.items():
            start = time.perf_counter()
            call()
            if turn:  # the first warms up
                best[key] = min(best[key], 1000 * (time.perf_counter() - start))
        end = end or time.perf_counter() + _SECONDS
        if turn > 2 and time.perf_counter() > end:
            break
    return best
