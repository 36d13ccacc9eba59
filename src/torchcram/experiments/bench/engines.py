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
from torchcram.experiments.machine import has_bfloat16_units

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.bench.candidates import Candidate

COMPILED_BFLOAT16 = "compiled-bf16"
CPU_ENGINES = (
    *("torch", "compiled", COMPILED_BFLOAT16, "onnxruntime", "torchcram", "torchcram-compiled"),
)
GPU_ENGINES = ("torch", "compiled", "torchcram")
DTYPE = torch.bfloat16  # on a GPU

Work = Callable[[], object]
"""Computes something, and returns when it is done."""


class UnableError(Exception):
    """An engine cannot run a model; the message is the reason."""


@dataclass(frozen=True)
class PreparedRun:
    """A model that an engine has prepared to run.

    Attributes:
        run: Function that computes the outputs, and returns when they are there.
        note: Remark for the table.
    """

    run: Work
    note: str = ""


class Engine(Protocol):
    """Something that prepares models to run."""

    @property
    def name(self) -> str:
        """Name of the engine."""

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:
        """Prepares a model to run on the example.

        Args:
            candidate: Model to run; it stays unchanged.
            example: Inputs, on the CPU.
            threads: Number of threads, which torch has been set to already.

        Raises:
            UnableError: If the engine cannot run the model.
        """


@dataclass(frozen=True)
class Torch:
    """Eager torch, in float32."""

    name: str = "torch"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:  # noqa: ARG002
        """Runs the model as it is."""
        return PreparedRun(_inference(candidate.model, example))


@dataclass(frozen=True)
class Compiled:
    """torch.compile with inductor, for the shape and the number of threads in use.

    Attributes:
        bfloat16: Whether weights and activations are bfloat16 instead of float32.
    """

    bfloat16: bool = False

    @property
    def name(self) -> str:
        """Name of the engine."""
        return COMPILED_BFLOAT16 if self.bfloat16 else "compiled"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:
        """Compiles the model and runs it once."""
        model = candidate.model
        if self.bfloat16:
            model = copy.deepcopy(model).bfloat16()
            example = example.bfloat16() if example.is_floating_point() else example
        return PreparedRun(_compiled(model, example, threads))


@dataclass(frozen=True)
class OnnxRuntime:
    """ONNX Runtime on the CPU.

    Attributes:
        file: Function that returns the ONNX file of a model for inputs of a shape, or raises
            UnableError.
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
        # its threads would go on spinning while the next engine is timed
        options.add_session_config_entry("session.force_spinning_stop", "1")
        session = onnxruntime.InferenceSession(
            self.file(candidate, example), options, providers=["CPUExecutionProvider"]
        )
        inputs = {session.get_inputs()[0].name: example.numpy()}
        return PreparedRun(lambda: session.run(None, inputs)[0])


@dataclass(frozen=True)
class Runtime:
    """Sparse CPU kernels where they are faster, by `torchcram.runtime.prepare`.

    Attributes:
        compiled: Whether the rest of the model is compiled around them.
    """

    compiled: bool = False

    @property
    def name(self) -> str:
        """Name of the engine."""
        return "torchcram-compiled" if self.compiled else "torchcram"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:
        """Times every layer, and replaces those that get faster."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the note says that there are no kernels
            built = runtime.available()
        fast = runtime.prepare(candidate.model, example)
        layers = runtime.report(fast)
        sparse = sum(layer.sparse for layer in layers)
        note = f"{sparse} of {len(layers)} layers sparse"
        if not built:
            note = "no kernels on this machine, all layers dense"
        run = _compiled(fast, example, threads) if self.compiled else _inference(fast, example)
        return PreparedRun(run, note)


def default_cpu_engines() -> tuple[str, ...]:
    """Returns the engines that a CPU is measured with if none are named.

    Dense models in bfloat16 are fast on processors with matrix units for it, and slow on others.
    """
    left_out = {"torchcram-compiled"} | (set() if has_bfloat16_units() else {COMPILED_BFLOAT16})
    return tuple(name for name in CPU_ENGINES if name not in left_out)


def cpu_engines(names: Sequence[str], file: Callable[[Candidate, Tensor], Path]) -> list[Engine]:
    """Returns engines by their names.

    Args:
        names: Names out of `CPU_ENGINES`.
        file: Function that returns ONNX files, as in `OnnxRuntime`.
    """
    every: list[Engine] = [
        Torch(),
        Compiled(),
        Compiled(bfloat16=True),
        OnnxRuntime(file),
        Runtime(),
        Runtime(compiled=True),
    ]
    known = {engine.name: engine for engine in every}
    return [known[name] for name in names]


def check_engines(names: Sequence[str], allowed: Sequence[str]) -> None:
    """Raises ValueError for an unknown engine, or one that is named twice."""
    for index, name in enumerate(names):
        if name not in allowed:
            maybe = did_you_mean(name, allowed)
            raise ValueError(f"engine {name!r}{maybe}: allowed are {', '.join(allowed)}")
        if name in names[:index]:
            raise ValueError(f"engine {name!r} is named twice")
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
    """Eager torch on a GPU, in bfloat16."""

    device: torch.device
    name: str = "torch"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:  # noqa: ARG002
        """Runs a copy of the model."""
        return PreparedRun(
            _waiting(_moved(candidate.model, self.device), _fed(example, self.device))
        )


@dataclass(frozen=True)
class GpuCompiled:
    """torch.compile with inductor on a GPU, in bfloat16."""

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
    """The fastest way that `torchcram.runtime.gpu.prepare_gpu` finds, the dense model included."""

    device: torch.device
    name: str = "torchcram"

    def prepare(self, candidate: Candidate, example: Tensor, threads: int) -> PreparedRun:  # noqa: ARG002
        """Times every layer and every way to run the model."""
        from torchcram.runtime.gpu import prepare_gpu

        try:
            with torch.cuda.device(self.device):
                fast, layers, mode = prepare_gpu(
                    candidate.model,
                    (example,),
                    operator=candidate.operator,
                    weights=candidate.weights,
                    dtype=DTYPE,
                    compile_model=True,
                )
        except ValueError as error:
            raise UnableError(str(error)) from None
        faster = sum(layer.kernel != "dense" for layer in layers)
        note = f"{faster} of {len(layers)} layers replaced; {mode.name}"
        return PreparedRun(_waiting(fast, _fed(example, self.device)), note)


def gpu_engines(names: Sequence[str], device: torch.device) -> list[Engine]:
    """Returns engines by their names out of `GPU_ENGINES`."""
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
