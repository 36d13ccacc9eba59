"""What runs a model on a GPU, in bfloat16: torch, compiled torch, the runtime of torchcram."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.bench.engines import Engine, Ready, UnableError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.bench.cases import Case
    from torchcram.experiments.bench.rounds import Work

GPU_ENGINES = ("torch", "compiled", "torchcram")
DTYPE = torch.bfloat16


@dataclass(frozen=True)
class GpuTorch:
    """Eager torch."""

    device: torch.device
    name: str = "torch"

    def prepare(self, case: Case, example: Tensor, threads: int) -> Ready:  # noqa: ARG002
        """Takes a copy of the model."""
        return Ready(_waiting(_moved(case.model, self.device), _fed(example, self.device)))


@dataclass(frozen=True)
class GpuCompiled:
    """torch.compile with inductor."""

    device: torch.device
    name: str = "compiled"

    def prepare(self, case: Case, example: Tensor, threads: int) -> Ready:  # noqa: ARG002
        """Compiles a copy of the model and runs it once."""
        faster = torch.compile(_moved(case.model, self.device), dynamic=False)
        run = _waiting(faster, _fed(example, self.device))
        run()
        return Ready(run)


@dataclass(frozen=True)
class GpuRuntime:
    """2:4 and integers where they pay, `torchcram.runtime.gpu.prepare_gpu`."""

    device: torch.device
    name: str = "torchcram"

    def prepare(self, case: Case, example: Tensor, threads: int) -> Ready:  # noqa: ARG002
        """Measures every layer, and exchanges those that get faster."""
        from torchcram.runtime.gpu import prepare_gpu

        try:
            with torch.cuda.device(self.device):
                fast, layers = prepare_gpu(
                    case.model,
                    (example,),
                    operator=case.operator,
                    weights=case.weights,
                    dtype=DTYPE,
                )
        except ValueError as error:
            raise UnableError(str(error)) from None
        faster = sum(one.kernel != "dense" for one in layers)
        note = f"{faster} of {len(layers)} layers exchanged"
        return Ready(_waiting(fast, _fed(example, self.device)), note)


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
