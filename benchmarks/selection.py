"""The k-th magnitude of all weights of a model, against what torch offers.

    python benchmarks/selection.py [--device cpu|cuda] [--repeats N]

torch.topk, sort and kthvalue get one flat tensor of magnitudes, concatenated beforehand and not
timed; torchcram gets the list of weights as a model has them. It returns masks, the others a
threshold or the kept values. Every call is timed alone, from the host's first move to the device's
last; on CUDA also without the host, replayed as a CUDA graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from timing import captured_milliseconds, machine, milliseconds
from torch import Tensor

from torchcram.selection import count_kept, keep_largest, keep_largest_each

SPARSITY = 0.9


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The shapes of the convolution and Linear weights of ResNet50: 25.5 M values."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            shapes += [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                shapes.append((4 * width, inputs, 1, 1))
            inputs = 4 * width
    return [*shapes, (1000, 2048)]


def bert_shapes() -> list[tuple[int, ...]]:
    """The shapes of the Linear weights of BERT-base: 85 M values."""
    shapes: list[tuple[int, ...]] = [
        (768, 768),
        (768, 768),
        (768, 768),
        (768, 768),
        (3072, 768),
        (768, 3072),
    ]
    return 12 * shapes


def measure(name: str, tensors: list[Tensor], device: torch.device, repeats: int) -> None:
    """Prints one line per method."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]).abs()
    keep = count_kept(flat.numel(), SPARSITY)
    each = [count_kept(tensor.numel(), SPARSITY) for tensor in tensors]
    print(f"\n{name}: {flat.numel() / 1e6:.1f} M values in {len(tensors)} tensors, {flat.dtype}")
    methods: dict[str, Callable[[], object]] = {
        "torchcram, all together": lambda: keep_largest(tensors, keep),
        "torchcram, each tensor": lambda: keep_largest_each(tensors, each),
        "torch.topk": lambda: flat.topk(keep, sorted=False),
        "torch.sort": flat.sort,
        "torch.kthvalue": lambda: flat.kthvalue(flat.numel() - keep + 1),
    }
    ours = 0.0
    for method, work in methods.items():
        slow = method == "torch.kthvalue"
        time = milliseconds(work, device, repeats=max(repeats // 4, 1) if slow else repeats)
        ours = ours or time
        line = f"  {method:<26}{time:>10.3f} ms{time / ours:>9.1f}x"
        if device.type == "cuda" and not slow:
            line += f"{captured_milliseconds(work):>10.3f} ms on the GPU alone"
        print(line, flush=True)


def main() -> None:
    """Measures on one device."""
    parser = argparse.ArgumentParser(description="Times exact magnitude selection.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(machine(device))
    generator = torch.Generator(device).manual_seed(0)
    for name, shapes in (("ResNet50", resnet50_shapes()), ("BERT-base", bert_shapes())):
        for dtype in (torch.float32, torch.bfloat16):
            tensors = [
                torch.randn(shape, device=device, generator=generator).to(dtype) for shape in shapes
            ]
            measure(name, tensors, device, arguments.repeats)


if __name__ == "__main__":
    main()
