"""Sparse kernels on the CPU against dense torch, compiled torch, ONNX Runtime and DeepSparse.

On processors with AMX, compiled torch is also measured in bfloat16.

    python benchmarks/runtime.py [--work linear bert resnet18 ...] [--rounds N] [--threads N]
                                 [--deepsparse PYTHON]

PYTHON is the interpreter of an environment with `deepsparse==1.8.0`, which runs the same pruned
models in a process of its own.

All ways to run a model take turns, round after round, so that other load on the machine affects all
of them. Ratios are those of the median times to dense torch, and in brackets those of the fastest
rounds. Weights are random, and each layer has the same sparsity. Outputs are compared with those of
dense layers.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy
import torch
from timing import machine
from torch import Tensor, nn

import torchcram
from torchcram import runtime
from torchcram.experiments.machine import has_bfloat16_units
from torchcram.experiments.models.small import ResNet18
from torchcram.runtime.outputs import tensor_error

SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95)
DENSE = ["MatMul", "Gemm"]  # operators of Linear layers in ONNX
BFLOAT16 = "torch.compile, bfloat16"
SERVER = Path(__file__).parent / "deepsparse_server.py"
Work = Callable[[], Tensor]


class Encoder(nn.Module):
    """An encoder of the architecture of BERT from Transformers; returns the last hidden states.

    Args:
        layers: Number of layers; the defaults are those of BERT-base.
        width: Number of features of a token.
        heads: Number of attention heads.
    """

    def __init__(self, *, layers: int = 12, width: int = 768, heads: int = 12) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
        self.bert = BertModel(config, add_pooling_layer=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps token numbers to vectors."""
        states: Tensor = self.bert(tokens).last_hidden_state
        return states


def with_statistics(model: nn.Module) -> nn.Module:
    """Gives batch norms random statistics, in place, and returns the model."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean = torch.randn(module.num_features) / 10
            module.running_var = torch.rand(module.num_features) + 0.5
    return model


def resnet50() -> nn.Module:
    """Returns the ResNet50 of torchvision with random weights."""
    from torchvision import models

    return with_statistics(models.resnet50())


def tokens(batch: int, length: int) -> Tensor:
    """Returns random token numbers (batch, length)."""
    return torch.randint(0, 30000, (batch, length))


WORK: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "linear": lambda: (nn.Linear(768, 768), torch.randn(384, 768)),
    "linear-wide": lambda: (nn.Linear(768, 3072), torch.randn(384, 768)),
    "bert": lambda: (Encoder(), tokens(1, 384)),
    "bert-16": lambda: (Encoder(), tokens(16, 128)),
    "resnet18": lambda: (with_statistics(ResNet18()), torch.randn(1, 3, 32, 32)),
    "resnet18-64": lambda: (with_statistics(ResNet18()), torch.randn(64, 3, 32, 32)),
    "resnet50": lambda: (resnet50(), torch.randn(1, 3, 224, 224)),
    "resnet50-16": lambda: (resnet50(), torch.randn(16, 3, 224, 224)),
}


def onnx_runtime(model: nn.Module, x: Tensor, threads: int, *, int8: bool = False) -> Work:
    """Returns a function that runs the model in ONNX Runtime, optionally with Linear in 8 bits."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model, (x,), str(path), dynamo=True, verbose=False)
        if int8:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(path, path, weight_type=QuantType.QInt8, op_types_to_quantize=DENSE)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        session = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: x.numpy()}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def export(model: nn.Module, x: Tensor, path: Path) -> None:
    """Writes a model as an ONNX file that DeepSparse reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), str(path), dynamo=False, opset_version=14)


def deepsparse(python: str, model: nn.Module, x: Tensor, threads: int) -> Work:
    """Returns a function that runs the model in DeepSparse, in a process of its own."""
    folder = Path(tempfile.mkdtemp())
    export(copy.deepcopy(model), x, folder / "model.onnx")
    numpy.save(folder / "x.npy", x.numpy())
    command = [python, str(SERVER), str(folder), str(threads)]
    environment = {**os.environ, "NM_DISABLE_ANALYTICS": "1"}
    process = subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )

    def run() -> Tensor:
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("DeepSparse did not start")
        process.stdin.write("run\n")
        process.stdin.flush()
        while not (line := process.stdout.readline()).startswith("done"):
            if not line:
                raise RuntimeError(f"DeepSparse ended: {' '.join(command)}")
        return torch.from_numpy(numpy.load(folder / "y.npy"))

    run()
    return run


def race(work: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each function in each round."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(rounds + 2):
        for name, call in work.items():
            start = time.perf_counter()
            call()
            if turn > 1:
                times[name].append(1000 * (time.perf_counter() - start))
    return times


def others(model: nn.Module, x: Tensor, threads: int) -> dict[str, Work]:
    """Returns the ways to run a model that the sparse kernels are compared with."""
    work: dict[str, Work] = {"torch": lambda: model(x)}
    compiled = torch.compile(copy.deepcopy(model))
    work["torch.compile"] = lambda: compiled(x)
    if has_bfloat16_units():
        small = torch.compile(copy.deepcopy(model).bfloat16())
        rounded = x.bfloat16() if x.is_floating_point() else x
        work[BFLOAT16] = lambda: small(rounded)
    try:
        work["ONNX Runtime"] = onnx_runtime(copy.deepcopy(model), x, threads)
    except ImportError:
        print("  (no ONNX Runtime)")
    return work


def measure(
    name: str,
    sparsities: Sequence[float],
    rounds: int,
    *,
    compile_too: bool,
    int8: bool,
    python: str | None,
) -> None:
    """Prints a line for each way to run a model."""
    torch.manual_seed(0)
    model, x = WORK[name]()
    model.eval().requires_grad_(False)
    work = others(model, x, torch.get_num_threads())
    errors = {}
    if BFLOAT16 in work:
        errors[BFLOAT16] = tensor_error(model(x), work[BFLOAT16]().float()).relative
    threads = torch.get_num_threads()
    fast = runtime.prepare(model, x)
    work["torchcram, dense"] = lambda dense=fast: dense(x)  # type: ignore[misc]
    if python:
        work["DeepSparse, dense"] = deepsparse(python, model, x, threads)
    if int8:
        key = "ONNX Runtime, 8 bits"
        work[key] = onnx_runtime(copy.deepcopy(model), x, torch.get_num_threads(), int8=True)
        errors[key] = tensor_error(model(x), work[key]()).relative
    for sparsity in sparsities:
        pruned = torchcram.compress(model, f"uniform:{sparsity}")
        fast = runtime.prepare(pruned, x)
        expected = pruned(x)
        key = f"torchcram {sparsity:.0%}"
        errors[key] = tensor_error(expected, fast(x)).relative
        work[key] = lambda fast=fast: fast(x)  # type: ignore[misc]
        if python:
            other = f"DeepSparse {sparsity:.0%}"
            work[other] = deepsparse(python, pruned, x, threads)
            errors[other] = tensor_error(expected, work[other]()).relative
        if int8:
            small = runtime.prepare(pruned, x, int8=True)
            errors[f"{key}, 8 bits"] = tensor_error(expected, small(x)).relative
            work[f"{key}, 8 bits"] = lambda small=small: small(x)  # type: ignore[misc]
        if compile_too:
            compiled = torch.compile(fast)
            work[f"{key}, compiled"] = lambda compiled=compiled: compiled(x)  # type: ignore[misc]
    print(f"\n{name}, input {tuple(x.shape)}", flush=True)
    times = race(work, rounds)
    dense = times["torch"]
    for key, each in times.items():
        ratio = statistics.median(dense) / statistics.median(each)
        line = f"  {key:<26}{statistics.median(each):>9.2f} ms{ratio:>7.2f}x"
        line += f"  (fastest {min(each):.2f} ms, {min(dense) / min(each):.2f}x)"
        print(line + (f"  error {errors[key]:.0e}" if key in errors else ""), flush=True)


def main() -> None:
    """Times the models and prints the results."""
    parser = argparse.ArgumentParser(description="Times sparse kernels on the CPU.")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", action="store_true", help="also compile around the kernels")
    parser.add_argument("--int8", action="store_true", help="also Linear layers in 8 bits")
    parser.add_argument("--deepsparse", metavar="PYTHON", help="interpreter with deepsparse")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine(torch.device("cpu")))
    for name in options.work:
        measure(
            name,
            options.sparsity,
            options.rounds,
            compile_too=options.compile,
            int8=options.int8,
            python=options.deepsparse,
        )


if __name__ == "__main__":
    main()
