"""Running a whole model on a GPU: eager, compiled, or captured as a CUDA graph."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcram.runtime.outputs import output_error

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[], object]

TOLERANCE = 0.05  # of the largest output: rounding to 16 bits adds up over the layers
ROUNDS = 5  # in which the modes take turns
ROUND = 0.02  # seconds of a mode in a round


@dataclass(frozen=True)
class RunMode:
    """How a model runs, and what else was tried.

    Attributes:
        name: Mode: "eager", "compiled", "captured" or "compiled, captured"; after "dense, " if the
            model without replaced layers was the fastest.
        milliseconds: Time of a call in every mode that was measured.
        failed: Reason of every mode that could not be used.
    """

    name: str = "eager"
    milliseconds: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


class CapturedModel(nn.Module):
    """Replays the forward pass of a model as a CUDA graph.

    Inputs of other shapes or dtypes, inputs that need a gradient, and keyword arguments run in the
    model itself. Every call copies its inputs and outputs, and calls from several threads at the
    same time are not allowed.

    Args:
        model: Model on a GPU, in eval mode, that does not wait for the device.
        example: Inputs on the same GPU, which decide on the shapes.

    Raises:
        ValueError: If the outputs hold objects other than tensors and plain values.
    """

    def __init__(self, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.model = model
        self._inputs = tuple(value.clone() for value in example)
        _require_plain(warm_up(model, self._inputs))
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._outputs = model(*self._inputs)

    def forward(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401
        """Returns the outputs, in memory of their own."""
        if options or not _alike(inputs, self._inputs) or _needs_gradient(inputs):
            return self.model(*inputs, **options)
        with torch.no_grad():
            for held, value in zip(self._inputs, inputs, strict=True):
                held.copy_(value)
            self._graph.replay()
            return pytree.tree_map_only(Tensor, Tensor.clone, self._outputs)


def _alike(inputs: tuple[object, ...], example: tuple[Tensor, ...]) -> bool:
    """Returns whether inputs are tensors on a GPU, with the shapes and dtypes of the example."""
    return len(inputs) == len(example) and all(
        isinstance(value, Tensor)
        and (value.shape, value.dtype, value.device) == (held.shape, held.dtype, held.device)
        for value, held in zip(inputs, example, strict=True)
    )


def _needs_gradient(inputs: tuple[Tensor, ...]) -> bool:
    return torch.is_grad_enabled() and any(value.requires_grad for value in inputs)


def _require_plain(outputs: object) -> None:
    """Raises ValueError if outputs hold anything that cannot be copied out of a graph."""
    for leaf in pytree.tree_leaves(outputs):
        if leaf is not None and not isinstance(leaf, (Tensor, bool, int, float, str)):
            raise ValueError(f"the outputs hold a {type(leaf).__name__}, which a graph cannot copy")


@torch.no_grad()
def warm_up(model: nn.Module, example: tuple[Tensor, ...]) -> object:
    """Runs a model twice on a stream beside the current one, as a capture requires."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        model(*example)
        outputs: object = model(*example)
    current.wait_stream(side)
    return outputs


def compile_for(model: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    """Returns a model that is compiled for the shapes of the example."""
    compiled: nn.Module = torch.compile(model, dynamic=False)  # type: ignore[assignment]
    with torch.no_grad():
        compiled(*example)
    return compiled


def choose_mode(
    models: dict[str, nn.Module], example: tuple[Tensor, ...]
) -> tuple[str, nn.Module, RunMode]:
    """Returns the fastest way to run one of several models that compute the same.

    Args:
        models: Models on a GPU in eval mode, by a prefix of the names of their modes.
        example: Inputs on the same GPU.

    Returns:
        Prefix of the model, the model ready to run, and its mode.
    """
    ready: dict[str, tuple[str, nn.Module]] = {}
    failed: dict[str, str] = {}
    for prefix, model in models.items():
        made = {"eager": model}
        with torch.no_grad():
            expected = model(*example)
        for name, source, make in (
            ("compiled", "eager", compile_for),
            ("captured", "eager", CapturedModel),
            ("compiled, captured", "compiled", CapturedModel),
        ):
            if source not in made:
                continue
            try:
                made[name] = _checked(make(made[source], example), example, expected)
            except Exception as error:  # noqa: BLE001  whatever a compiler or a capture may raise
                failed[prefix + name] = f"{type(error).__name__}: {error}".splitlines()[0]
        ready |= {prefix + name: (prefix, each) for name, each in made.items()}
    runs = {name: _call(model, example) for name, (_, model) in ready.items()}
    times = time_in_turns(runs)
    best = min(times, key=times.__getitem__)
    prefix, model = ready[best]
    return prefix, model, RunMode(best, times, failed)


@torch.no_grad()
def _checked(model: nn.Module, example: tuple[Tensor, ...], expected: object) -> nn.Module:
    """Returns the model; raises ValueError if it does not compute what is expected."""
    error = output_error(expected, model(*example))
    if error > TOLERANCE:
        raise ValueError(f"outputs differ by {error:.2g} of the largest value")
    return model


def _call(model: nn.Module, example: tuple[Tensor, ...]) -> Run:
    @torch.no_grad()
    def run() -> object:
        return model(*example)

    return run


def time_in_turns(runs: dict[str, Run]) -> dict[str, float]:
    """Returns the median milliseconds of a call for each of several functions, taken in turns."""
    repeats = {name: max(1, int(ROUND / max(_seconds(run, 1), 1e-6))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(1000 * _seconds(run, repeats[name]))
    return {name: statistics.median(measured) for name, measured in times.items()}


def _seconds(run: Run, repeats: int) -> float:
    """Returns the time of a call; the device is waited for before and after `repeats` of them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats
