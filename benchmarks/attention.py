"""The attention kernel of torchcram against scaled_dot_product_attention, in whole encoders.

    python benchmarks/attention.py [--work bert-1x128 ...] [--sparsity 0 0.8 0.9] [--rounds N]
                                   [--threads N]

A model is pruned and prepared once. Copies of it differ only in their attention:

    kernel    the kernel of torchcram
    sdpa      torch.nn.functional.scaled_dot_product_attention in its place
    original  the attention module of Transformers, as if it had never been replaced

They take turns, round after round, and each round begins with another one. A ratio is the median
over all rounds of the time in a round divided by the time of the kernel in the same round: above 1
the kernel is faster. Brackets hold the quartiles. `prepare` itself leaves the attention of a dense
model alone; for sparsity 0 it is replaced here all the same.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from runtime import Encoder, tokens
from timing import machine
from torch import Tensor, nn

import torchcram
from torchcram import runtime
from torchcram.runtime.cpu.fuse import SelfAttention
from torchcram.runtime.outputs import tensor_error

SPARSITIES = (0.0, 0.8, 0.9)
WARMUP = 3  # rounds
SHAPES: dict[str, Callable[[], Encoder]] = {
    "bert": Encoder,  # BERT-base
    "minilm": lambda: Encoder(layers=6, width=384),  # MiniLM-L6
}
WORK = {
    "bert-1x128": ("bert", 1, 128),
    "bert-1x384": ("bert", 1, 384),
    "bert-8x128": ("bert", 8, 128),
    "minilm-1x128": ("minilm", 1, 128),
    "minilm-8x128": ("minilm", 8, 128),
}


def with_attention(model: nn.Module, kind: str) -> nn.Module:
    """Returns a copy of a prepared encoder with a kind of attention in every layer.

    Args:
        model: Prepared encoder.
        kind: Kind of attention: "kernel", "sdpa" or "original".
    """
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        attention = getattr(module, "self", None)
        if not isinstance(attention, nn.Module):
            continue
        original: Any = getattr(attention, "original", attention)
        module.self = original
        if kind != "original":
            heads, scale = original.num_attention_heads, original.attention_head_size**-0.5
            module.self = SelfAttention(original, heads, scale, own_kernel=kind == "kernel")
    return model


def take_turns(models: dict[str, nn.Module], x: Tensor, rounds: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each model in each round."""
    times: dict[str, list[float]] = {kind: [] for kind in models}
    order = list(models)
    for turn in range(WARMUP + rounds):
        for kind in order:
            start = time.perf_counter()
            models[kind](x)
            if turn >= WARMUP:
                times[kind].append(1000 * (time.perf_counter() - start))
        order = order[1:] + order[:1]
    return times


def measure(name: str, sparsity: float, rounds: int) -> float:
    """Prints a line for each kind of attention, and returns the ratio of sdpa to the kernel."""
    shape, batch, length = WORK[name]
    torch.manual_seed(0)
    model: nn.Module = SHAPES[shape]().eval().requires_grad_(False)
    x = tokens(batch, length)
    if sparsity:
        model = torchcram.compress(model, f"uniform:{sparsity}")
    prepared = runtime.prepare(model, x)
    fused = sum(isinstance(module, SelfAttention) for module in prepared.modules())
    sparse = sum(choice.sparse for choice in runtime.report(prepared))
    print(
        f"\n{name}, sparsity {sparsity:.0%}: {sparse} sparse layers, attention replaced by "
        f"prepare in {fused} layers",
        flush=True,
    )
    models = {kind: with_attention(prepared, kind) for kind in ("kernel", "sdpa", "original")}
    expected = model(x)
    times = take_turns(models, x, rounds)
    ratios = {}
    for kind, each in times.items():
        pairs = [a / b for a, b in zip(each, times["kernel"], strict=True)]
        ratios[kind] = statistics.median(pairs)
        low, _, high = statistics.quantiles(pairs, n=4)
        error = tensor_error(expected, models[kind](x)).relative
        print(
            f"  {kind:<10}{statistics.median(each):>9.2f} ms  ratio {ratios[kind]:.3f} "
            f"({low:.3f} to {high:.3f})  fastest {min(each):.2f} ms  error {error:.0e}",
            flush=True,
        )
    return ratios["sdpa"]


def main() -> None:
    """Measures the encoders and prints the mean ratios of the dense and the pruned ones."""
    parser = argparse.ArgumentParser(description="Times attention in whole encoders.")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--sparsity", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--rounds", type=int, default=40, help="number of timed rounds, at least 2")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(machine(torch.device("cpu")))
    if not runtime.available():
        raise SystemExit("the kernels have not been built: python -m torchcram.runtime.build")
    ratios: dict[float, list[float]] = {}
    with torch.inference_mode():
        for name in options.work:
            for sparsity in options.sparsity:
                ratio = measure(name, sparsity, options.rounds)
                ratios.setdefault(sparsity, []).append(ratio)
    print("\nsdpa over kernel, geometric mean of all encoders (the kernel stays above 1.03)")
    for sparsity, each in ratios.items():
        print(f"  sparsity {sparsity:.0%}: {math.exp(statistics.fmean(map(math.log, each))):.3f}")


if __name__ == "__main__":
    main()
