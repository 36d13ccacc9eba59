"""Running a whole model on a GPU: eager, compiled, or captured as a CUDA graph."""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchcram.capture import capturing
from torchcram.runtime.outputs import output_error

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[[], object]

TOLERANCE = 0.05  # of the largest output: rounding to 16 bits adds up over the layers
ROUNDS = 5  # in which the modes take turns
ROUND = 0.02  # seconds of a mode in a round
DENSE = "dense, "  # prefix of modes of the model without replaced layers


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


class SpecializedModel(nn.Module, ABC):
    """A model with a fast path for inputs with the shapes, dtypes and device of an example.

    Other inputs, keyword arguments and inputs that need a gradient run in the model itself. It
    cannot be moved or cast.

    Args:
        model: Model on a GPU, in eval mode.
        example: Inputs on the same GPU.
    """

    def __init__(self, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.model = model
        self._example = example

    @abstractmethod
    def run(self, inputs: tuple[Tensor, ...]) -> object:
        """Returns the outputs for inputs like the example."""

    def forward(self, *inputs: Any, **options: Any) -> Any:  # noqa: ANN401
        """Returns the outputs, in memory of their own."""
        if options or not _alike(inputs, self._example) or _needs_gradient(inputs):
            return self.model(*inputs, **options)
        with torch.inference_mode(False), torch.no_grad():
            return self.run(_without_inference(inputs))

    def _apply(self, *_: Any, **__: Any) -> Any:  # noqa: ANN401
        raise RuntimeError("a prepared model cannot be moved or cast: prepare it anew")


class CompiledModel(SpecializedModel):
    """A model that is compiled for the example; see `SpecializedModel`."""

    def __init__(self, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        super().__init__(model, example)
        compiled = torch.compile(model, dynamic=False)
        self._compiled = [compiled]  # in a list, so that it is no second child
        # By default, the ninth model of a class would run eagerly, with a warning.
        with torch._dynamo.config.patch(recompile_limit=1024, fail_on_recompile_limit_hit=True):
            self(*example)

    def run(self, inputs: tuple[Tensor, ...]) -> object:
        """Returns the outputs for inputs like the example."""
        return self._compiled[0](*inputs)


class CapturedModel(SpecializedModel):
    """A model whose forward pass is replayed as a CUDA graph; see `SpecializedModel`.

    Every call copies its inputs and outputs, and calls from several threads at the same time are
    not allowed.

    Args:
        model: Model on a GPU, in eval mode, that does not wait for the device.
        example: Inputs on the same GPU.
        compiled: The same model compiled, to capture in its place; None for the model itself.

    Raises:
        ValueError: If the outputs hold objects other than tensors and plain values.
    """

    def __init__(
        self,
        model: nn.Module,
        example: tuple[Tensor, ...],
        compiled: nn.Module | None = None,
    ) -> None:
        super().__init__(model, tuple(value.clone() for value in example))
        source = model if compiled is None else compiled
        _require_plain(warm_up(source, self._example))
        self._graph = torch.cuda.CUDAGraph()
        with capturing(self._graph):
            self._outputs = source(*self._example)

    def run(self, inputs: tuple[Tensor, ...]) -> object:
        """Returns the outputs for inputs like the example."""
        for held, value in zip(self._example, inputs, strict=True):
            held.copy_(value)
        self._graph.replay()
        return pytree.tree_map_only(Tensor, Tensor.clone, self._outputs)


def _without_inference(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Returns inputs with tensors of inference mode copied, for which compilers compile anew."""
    return tuple(value.clone() if value.is_inference() else value for value in inputs)


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


def warm_up(model: nn.Module, example: tuple[Tensor, ...]) -> object:
    """Runs a model twice on a stream beside the current one, as a capture requires."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        model(*example)
        outputs: object = model(*example)
    current.wait_stream(side)
    return outputs


@torch.inference_mode(False)
@torch.no_grad()
def choose_mode(
    models: dict[str, nn.Module], example: tuple[Tensor, ...]
) -> tuple[nn.Module, RunMode]:
    """Returns the fastest way to run one of several models that compute the same.

    Args:
        models: Models on a GPU in eval mode, by a prefix of the names of their modes.
        example: Inputs on the same GPU.

    Returns:
        The model ready to run, and its mode.
    """
    example = _without_inference(example)
    ready: dict[str, nn.Module] = {}
    failed: dict[str, str] = {}
    for prefix, model in models.items():
        made, problems = _modes_of(model, example)
        ready |= {prefix + name: each for name, each in made.items()}
        failed |= {prefix + name: reason for name, reason in problems.items()}
    times = time_in_turns({name: partial(model, *example) for name, model in ready.items()})
    best = min(times, key=times.__getitem__)
    return ready[best], RunMode(best, times, failed)


def _modes_of(
    model: nn.Module, example: tuple[Tensor, ...]
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Returns a model in all modes that work, and the reasons of those that do not."""
    made: dict[str, nn.Module] = {"eager": model}
    failed: dict[str, str] = {}
    for name, make in (
        ("compiled", lambda: CompiledModel(model, example)),
        ("captured", lambda: CapturedModel(model, example)),
        ("compiled, captured", lambda: CapturedModel(model, example, made["compiled"])),
    ):
        if name == "compiled, captured" and "compiled" in failed:
            failed[name] = failed["compiled"]
            continue
        try:
            made[name] = _checked(make(), model, example)
        except Exception as error:  # noqa: BLE001  whatever a compiler or a capture may raise
            failed[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return made, failed


def _checked(fast: nn.Module, model: nn.Module, example: tuple[Tensor, ...]) -> nn.Module:
    """Returns `fast`; raises ValueError if it does not compute what `model` does.

    The second example has other values, so that a result of the first one cannot pass for it.
    """
    for inputs in (example, tuple(value.flip(-1) if value.dim() else value for value in example)):
        error = output_error(model(*inputs), fast(*inputs))
        if error > TOLERANCE:
            raise ValueError(f"outputs differ by {error:.2g} of the largest value")
    return fast


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
