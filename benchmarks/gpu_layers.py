"""Layers on the GPU: dense, 2:4, 8 bits and 4 bits.

    python benchmarks/gpu_layers.py [--tokens 1,16,384] [--dtypes bfloat16,float16] [--images 64]

Prints a Markdown table: the microseconds of the dense layer, and the speedups of the others over it
(slower below 1). Times are those of the GPU alone: a CUDA graph is replayed over enough copies of
the layer for its weights to come from memory. A kernel that is five times slower than dense is not
tried with more tokens. If torchao is installed, its int4 layer is timed, too.

A second table has the 1x1 convolutions of ResNet50 on images of 224x224 in channels_last: dense,
the product with the 2:4 weight alone, and the whole layer, with its outputs in channels_last again.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timing import machine
from torch import Tensor, nn

from torchcram import NM, Operator, Quantize
from torchcram.runtime.gpu.layers import Int4Linear, Int8Linear, sparse_conv, sparse_linear
from torchcram.runtime.gpu.prepare import agree, count_copies, gpu_milliseconds
from torchcram.runtime.integers import find_integers
from torchcram.weights import LayerWeights

SHAPES = {  # outputs, inputs
    "BERT-base": ((768, 768), (3072, 768), (768, 3072)),
    "1 B decoder": ((2048, 2048), (8192, 2048), (2048, 8192)),
}
CONVOLUTIONS = {  # of ResNet50: outputs, inputs, side of the image, stride
    "56x56": ((64, 256, 56, 1), (256, 64, 56, 1)),
    "28x28": ((128, 512, 28, 1), (512, 128, 28, 1), (512, 256, 56, 2)),
    "14x14": ((256, 1024, 14, 1), (1024, 256, 14, 1), (1024, 512, 28, 2)),
    "7x7": ((512, 2048, 7, 1), (2048, 512, 7, 1), (2048, 1024, 14, 2)),
}
KINDS = ("2:4", "int8", "int4", "torchao int4")
SLOW = 0.2
GROUP = 128
Make = Callable[[], nn.Module]


def compressed(weight: Tensor, operator: Operator) -> LayerWeights:
    """Returns a compressed copy of a weight."""
    weights = LayerWeights({"weight": weight.clone()})
    operator.compress_(weights)
    return weights


def kernels(weight: Tensor, dtype: torch.dtype) -> dict[str, tuple[Tensor, Make]]:
    """Returns for each kernel the dense weight that it represents, and a function for its layer."""
    sparse = compressed(weight, NM(2, 4))["weight"].to(dtype)
    layers: dict[str, tuple[Tensor, Make]] = {"2:4": (sparse, partial(sparse_linear, sparse, None))}
    for quantize in (Quantize(8), Quantize(4, GROUP)):
        weights = compressed(weight, quantize)
        integers = find_integers(weights, "weight", quantize)
        plain = weights["weight"].to(dtype)
        if quantize.bits == 8:
            layers["int8"] = (plain, partial(Int8Linear, integers, None))
        elif dtype == torch.bfloat16:
            layers["int4"] = (plain, partial(Int4Linear, integers, None))
            if importlib.util.find_spec("torchao") is not None:
                layers["torchao int4"] = (plain, partial(torchao_int4, plain))
    return layers


def torchao_int4(weight: Tensor) -> nn.Module:
    """Returns torchao's layer for 4 bits; it rounds the weight once more."""
    quantization: Any = importlib.import_module("torchao.quantization")
    layer = dense(weight)
    quantization.quantize_(layer, quantization.Int4WeightOnlyConfig(group_size=GROUP))
    return layer


def dense(weight: Tensor) -> nn.Linear:
    """Returns a Linear layer with a copy of a weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return layer


class Candidate:
    """Copies of a layer with a kernel.

    Attributes:
        stopped: Reason why it is no longer timed; None if it is.
    """

    def __init__(self, plain: Tensor, make: Make, copies: int) -> None:
        self._plain = plain
        self._layers: list[nn.Module] = []
        self.stopped: str | None = None
        try:
            self._layers = [make() for _ in range(copies)]
        except (RuntimeError, ImportError, ValueError) as error:
            self.stopped = f"cannot be made: {str(error).splitlines()[0]}"

    def milliseconds(self, x: Tensor) -> float:
        """Returns the milliseconds of a call with an input."""
        return gpu_milliseconds([partial(layer, x) for layer in self._layers])

    def cell(self, x: Tensor, dense_time: float) -> str:
        """Returns the cell of the table: the speedup, or a word for a failure."""
        if self.stopped is not None:
            return "-"
        try:
            if not agree(self._layers[0](x), nn.functional.linear(x, self._plain)):
                self.stopped = f"wrong at {len(x)} tokens"
                return "wrong"
            speedup = dense_time / self.milliseconds(x)
        except RuntimeError as error:
            self.stopped = f"fails at {len(x)} tokens: {str(error).splitlines()[0]}"
            return "fails"
        if speedup < SLOW:
            self.stopped = f"{speedup:.2f} at {len(x)} tokens, not tried at more"
        return f"{speedup:.2f}"


@torch.no_grad()
def measure(shape: tuple[int, int], dtype: torch.dtype, tokens: list[int]) -> list[list[str]]:
    """Returns a row of the table for every number of tokens."""
    weight = torch.randn(shape, device="cuda") / shape[1] ** 0.5
    copies = count_copies(weight.numel() * dtype.itemsize)
    plain = weight.to(dtype)
    base = Candidate(plain, partial(dense, plain), copies)
    others = {
        kind: Candidate(represented, make, copies)
        for kind, (represented, make) in kernels(weight, dtype).items()
    }
    rows = []
    for count in tokens:
        x = torch.randn(count, shape[1], device="cuda", dtype=dtype)
        time_ = base.milliseconds(x)
        row = [f"{shape[0]} x {shape[1]}", str(dtype)[6:], str(count), f"{1000 * time_:.1f}"]
        row += [others[kind].cell(x, time_) if kind in others else "-" for kind in KINDS]
        rows.append(row)
    for kind, other in others.items():
        if other.stopped is not None:
            print(f"{kind}, {shape[0]} x {shape[1]}, {dtype}: {other.stopped}", flush=True)
    return rows


@torch.no_grad()
def convolution(
    outputs: int, inputs: int, side: int, stride: int, images: int, dtype: torch.dtype
) -> list[str]:
    """Returns a row of the table of convolutions."""
    layer = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False, device="cuda")
    NM(2, 4).compress_(LayerWeights({"weight": layer.weight}))
    layer = layer.to(dtype).requires_grad_(False)
    x = torch.randn(images, inputs, side, side, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    sparse = sparse_conv(layer)
    base = gpu_milliseconds([partial(layer, x)])
    pixels = x[..., ::stride, ::stride].movedim(1, -1).contiguous()
    times = [
        gpu_milliseconds([call]) for call in (partial(sparse.linear, pixels), partial(sparse, x))
    ]
    speeds = [f"{base / each:.2f}" for each in times]
    if not agree(sparse(x), layer(x)):
        speeds = ["wrong"] * 2
    return [f"{outputs} x {inputs}", str(stride), str(dtype)[6:], f"{1000 * base:.1f}", *speeds]


def main() -> None:
    """Times the layers and prints the table."""
    parser = argparse.ArgumentParser(description="Times compressed Linear layers on the GPU.")
    parser.add_argument("--tokens", default="1,16,384,4096,16384")
    parser.add_argument("--dtypes", default="bfloat16,float16")
    parser.add_argument("--images", type=int, default=64, help="Images in a batch; 0 for none.")
    options = parser.parse_args()
    print(machine(torch.device("cuda")))
    start = time.perf_counter()
    gc.freeze()  # every capture of a graph collects garbage
    torch.manual_seed(0)
    tokens = [int(count) for count in options.tokens.split(",")]
    titles = ["model", "outputs x inputs", "dtype", "tokens", "dense µs"]
    titles += KINDS
    lines = ["| " + " | ".join(titles) + " |", "|---|---|---|" + "--:|" * (len(titles) - 3)]
    for model, shapes in SHAPES.items():
        for shape in shapes:
            for name in options.dtypes.split(","):
                rows = measure(shape, getattr(torch, name), tokens)
                lines += ["| " + " | ".join([model, *row]) + " |" for row in rows]
            torch.cuda.empty_cache()
    print("\n".join(lines))
    if options.images:
        print(f"\n1x1 convolutions of ResNet50, {options.images} images in a batch")
        titles = ["pixels", "outputs x inputs", "stride", "dtype", "dense µs", "2:4 product", "2:4"]
        print("| " + " | ".join(titles) + " |\n|---|---|--:|---|--:|--:|--:|")
        for pixels, convolutions in CONVOLUTIONS.items():
            for sizes in convolutions:
                for name in options.dtypes.split(","):
                    row = convolution(*sizes, options.images, getattr(torch, name))
                    print("| " + " | ".join([pixels, *row]) + " |", flush=True)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
