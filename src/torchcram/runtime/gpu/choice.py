"""The fastest way to run a Linear layer on the GPU at hand, by measurement."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from torchcram.runtime.gpu.layers import Int4Linear, Int8Linear, sparse_linear
from torchcram.runtime.gpu.rules import why_not_int4, why_not_int8, why_not_sparse
from torchcram.runtime.gpu.timing import count_copies, gpu_milliseconds
from torchcram.runtime.outputs import tensor_error

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.runtime.onnx.integers import Integers

LEAST = 1.05  # how much faster a layer has to be to be replaced
TOLERANCE = 0.02  # of the largest output, between two ways to compute in 16 bits


@dataclass(frozen=True)
class LayerChoice:
    """How a layer runs, and why.

    Attributes:
        name: of the layer.
        kernel: "dense", "2:4", "int8" or "int4".
        speedup: of the fastest that could be measured, over dense on the real shape.
        reason: in words.
    """

    name: str
    kernel: str
    speedup: float | None
    reason: str


class Kernel(NamedTuple):
    """A way to run a layer: why it cannot be taken, None where it can, and how to make it."""

    why_not: str | None
    make: Callable[[], nn.Module]


class Chooser:
    """Chooses for one layer after another; layers of the same shape are measured once."""

    def __init__(self) -> None:
        self._times: dict[tuple[object, ...], float | None] = {}

    @torch.no_grad()
    def choose(
        self, name: str, layer: nn.Linear, rows: int, *, integers: Integers | None
    ) -> tuple[LayerChoice, nn.Module | None]:
        """Returns what a layer is to run by, and the layer in its place; None where it stays.

        Args:
            name: of the layer.
            layer: on the GPU.
            rows: how many rows its input has.
            integers: of its weight, where that is quantized; on the GPU.
        """
        kernels = kernels_for(layer, integers)
        usable = {kind: kernel for kind, kernel in kernels.items() if kernel.why_not is None}
        if not usable:
            reasons = dict.fromkeys(str(kernel.why_not) for kernel in kernels.values())
            return LayerChoice(name, "dense", None, "; ".join(reasons)), None
        dense = self._time("dense", partial(copy.deepcopy, layer), layer, rows)
        times = {kind: self._time(kind, one.make, layer, rows) for kind, one in usable.items()}
        speedups = {
            kind: dense / time
            for kind, time in times.items()
            if time is not None and dense is not None
        }
        if not speedups:
            reason = f"{', '.join(usable)}: cannot be run here, or gives something else"
            return LayerChoice(name, "dense", None, reason), None
        best = max(speedups, key=speedups.__getitem__)
        measured = ", ".join(f"{kind} {value:.2f} x dense" for kind, value in speedups.items())
        reason = f"{measured}, at {rows} rows"
        if speedups[best] < LEAST:
            return LayerChoice(name, "dense", speedups[best], reason), None
        made = usable[best].make()
        if not gives_the_same(made, layer, rows):  # another layer of this shape was measured
            reason = f"{best} gives something else with these weights"
            return LayerChoice(name, "dense", speedups[best], reason), None
        return LayerChoice(name, best, speedups[best], reason), made

    def _time(
        self, kind: str, make: Callable[[], nn.Module], layer: nn.Linear, rows: int
    ) -> float | None:
        key = (kind, *layer.weight.shape, layer.weight.dtype, layer.bias is None, rows)
        if key not in self._times:
            self._times[key] = _milliseconds(make, layer, rows)
        return self._times[key]


def kernels_for(layer: nn.Linear, integers: Integers | None) -> dict[str, Kernel]:
    """Returns all kernels, with the reasons of those that do not fit a layer."""
    weight, bias, dtype = layer.weight.detach(), layer.bias, layer.weight.dtype
    sparse = Kernel(why_not_sparse(weight, dtype), partial(sparse_linear, weight, bias))
    if integers is None:
        return {"2:4": sparse, "integers": Kernel("not quantized", partial(copy.deepcopy, layer))}
    int8 = Kernel(why_not_int8(integers, dtype), partial(Int8Linear, integers, bias))
    int4 = Kernel(why_not_int4(integers, dtype), partial(Int4Linear, integers, bias))
    return {"2:4": sparse, "int8": int8, "int4": int4}


def _milliseconds(make: Callable[[], nn.Module], layer: nn.Linear, rows: int) -> float | None:
    """Times a layer; None where it cannot be run on this GPU or gives something else."""
    weight = layer.weight
    try:
        first = make()
        if not gives_the_same(first, layer, rows):
            return None
        count = count_copies(weight.numel() * weight.element_size())
        copies = [first, *(make() for _ in range(count - 1))]
        x = _random_rows(layer, rows)
        return gpu_milliseconds([partial(one, x) for one in copies])
    except Exception:  # noqa: BLE001  no kernel in this torch or for this GPU, or it fails to compile
        return None


def _random_rows(layer: nn.Linear, rows: int) -> Tensor:
    weight = layer.weight
    return torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype)


def gives_the_same(made: nn.Module, layer: nn.Linear, rows: int) -> bool:
    """Whether a layer gives what the dense one does, but for rounding, on random rows."""
    x = _random_rows(layer, rows)
    return agree(made(x), layer(x))


def agree(found: Tensor, expected: Tensor) -> bool:
    """Whether two results in 16 bits are the same but for rounding."""
    return tensor_error(expected, found).relative <= TOLERANCE
