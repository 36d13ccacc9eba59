"""Engines that run a model: torch, compiled torch, ONNX Runtime and the torchcram runtimes."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch

from torchcram import runtime
from torchcram.experiments.io.dataclass_io import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.bench.candidates import Candidate
    from torchcram.experiments.bench.timer import Work


CPU_ENGINES = ("torch", "compiled", "onnxruntime", "torchcram", "torchcram-compiled")
DEFAULT = CPU_ENGINES[:4]
GPU_ENGINES = ("torch", "compiled", "torchcram")
DTYPE = torch.bfloat16  # on a GPU


class UnableError(Exception):
    """An engine cannot run a model; the text says why."""


@dataclass(frozen=True)
class PreparedRun:
    """An engine that can run a model.

    Attributes:
        run: computes the outputs, and returns when it has them.
        note: what there is to say.
    """

    run: Work
    note: str = ""


class Engine(Protocol):
    """Makes models ready to run."""

    @property
    def name(self) -> str:
        """Of the engine."""

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:
        """Returns how to run a model on the example, by so many threads; torch has these already.

        Raises:
            UnableError: if it cannot.
        """


@dataclass(frozen=True)
class Torch:
    """Eager torch, in float32."""

    name: str = "torch"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:  # noqa: ARG002
        """Takes the model as it is."""
        return PreparedRun(_inference(candidate.model, example))


@dataclass(frozen=True)
class Compiled:
    """torch.compile with inductor, for the shape and the threads in use."""

    name: str = "compiled"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:
        """Compiles the model and runs it once."""
        return PreparedRun(_compiled(candidate.model, example, threads))


@dataclass(frozen=True)
class OnnxRuntime:
    """ONNX Runtime on the CPU.

    Attributes:
        file: gives the ONNX file of a model for inputs of a shape; raises UnableError.
    """

    file: Callable[[Candidate, Tensor], Path]
    name: str = "onnxruntime"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:
        """Loads the file."""
        try:
            import onnxruntime
        except ImportError as error:
            raise UnableError(f'{error.name} is missing: pip install "torchcram[export]"') from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3  # errors only
        # integers become floats when the file is loaded, rather than in every run
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        # its threads would go on spinning in the turn of whoever comes next
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            self.file(candidate, example), options, providers=["CPUExecutionProvider"]
        )
        given = {session.get_inputs()[0].name: example.numpy()}
        return PreparedRun(lambda: session.run(None, given)[0])


@dataclass(frozen=True)
class Runtime:
    """Sparse kernels where they pay, `torchcram.runtime.prepare`.

    Attributes:
        compiled: whether the rest of the model is compiled around them.
    """

    compiled: bool = False

    @property
    def name(self) -> str:
        """Of the engine."""
        return "torchcram-compiled" if self.compiled else "torchcram"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:
        """Measures every layer, and exchanges those that get faster."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there are no kernels, the note says
            built = runtime.available()
        fast = runtime.prepare(candidate.model, example)
        layers = runtime.report(fast)
        sparse = sum(one.sparse for one in layers)
        note = f"{sparse} of {len(layers)} layers sparse"
        if not built:
            note = "no kernels on this machine, all layers dense"
        run = _compiled(fast, example, threads) if self.compiled else _inference(fast, example)
        return PreparedRun(run, note)


def cpu_engines(names: Sequence[str], file: Callable[[Candidate, Tensor], Path]) -> list[Engine]:
    """Returns engines by their names.

    Args:
        names: of `CPU_ENGINES`.
        file: as `OnnxRuntime` wants it.
    """
    every: list[Engine] = [
        Torch(),
        Compiled(),
        OnnxRuntime(file),
        Runtime(),
        Runtime(compiled=True),
    ]
    known = {engine.name: engine for engine in every}
    return [known[name] for name in names]


def check_engines(names: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises ValueError for an engine that there is not, or that comes twice."""
    for place, name in enumerate(names):
        if name not in allowed:
            maybe = did_you_mean(name, allowed)
            raise ValueError(f"engine {name!r}{maybe}: allowed are {', '.join(allowed)}")
        if name in names[:place]:
            raise ValueError(f"engine {name!r} comes twice")
    if not names:
        raise ValueError(f"no engine: allowed are {', '.join(allowed)}")


def _inference(model: nn.Module, example: Tensor) -> Work:
    @torch.inference_mode()
    def run() -> object:
        return model(example)

    return run


def _compiled(model: nn.Module, example: Tensor, threads: int) -> Work:
    # generated code has the number of threads in it
    faster = torch.compile(model, dynamic=False, options={"cpp.threads": threads})

    @torch.no_grad()
    def run() -> object:
        return faster(example)

    run()
    return run


@dataclass(frozen=True)
class GpuTorch:
    """Eager torch."""

    device: torch.device
    name: str = "torch"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:  # noqa: ARG002
        """Takes a copy of the model."""
        return PreparedRun(
            _waiting(_moved(candidate.model, self.device), _fed(example, self.device))
        )


@dataclass(frozen=True)
class GpuCompiled:
    """torch.compile with inductor."""

    device: torch.device
    name: str = "compiled"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:  # noqa: ARG002
        """Compiles a copy of the model and runs it once."""
        faster = torch.compile(_moved(candidate.model, self.device), dynamic=False)
        run = _waiting(faster, _fed(example, self.device))
        run()
        return PreparedRun(run)


@dataclass(frozen=True)
class GpuRuntime:
    """2:4 and integers where they pay, `torchcram.runtime.gpu.prepare_gpu`."""

    device: torch.device
    name: str = "torchcram"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:  # noqa: ARG002
        """Measures every layer, and exchanges those that get faster."""
        from torchcram.runtime.gpu import prepare_gpu

        try:
            with torch.cuda.device(self.device):
                fast, layers = prepare_gpu(
                    candidate.model,
                    (example,),
                    operator=candidate.operator,
                    weights=candidate.weights,
                    dtype=DTYPE,
                )
        except ValueError as error:
            raise UnableError(str(error)) from None
        faster = sum(one.kernel != "dense" for one in layers)
        note = f"{faster} of {len(layers)} layers exchanged"
        return PreparedRun(_waiting(fast, _fed(example, self.device)), note)


def gpu_engines(names: Sequence[str], device: torch.device) -> list[Engine]:
    """Returns engines by their names, of `GPU_ENGINES`."""
    every: list[Engine] = [GpuTorch(device), GpuCompiled(device), GpuRuntime(device)]
    known = {engine.name: engine for engine in every}
    return [known[name] for name in names]


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    return copy.deepcopy(model).to(device, DTYPE).eval().requires_grad_(False)


def _fed(example: Tensor, device: torch.device) -> Tensor:
    return example.to(device, DTYPE if example.is_floating_point() else example.dtype)


def _waiting(model: Callable[[Tensor], object], example: Tensor) -> Work:
    @torch.no_grad()
    def run() -> object:
        outputs = model(example)
        torch.cuda.synchronize(example.device)
        return outputs

    return run
