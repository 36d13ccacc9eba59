"""Time and memory of the pruners on an encoder of 6 layers, 384 wide: 10.6 M weights.

    python benchmarks/pruners.py [--device cpu|cuda] [--gradients N] [--batch N] [--length N]

Random weights and inputs: neither the time nor the memory depends on them. For Obs the parts are
timed too, once each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from timing import machine
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from torchcram import NM, UniformTopK, Weights, compressible_weights
from torchcram.pruners import Calibration, Obs, Pruner, SparseGPT, Wanda, prune_
from torchcram.pruners.obs import Fisher

LAYERS, WIDTH, HEADS, CLASSES = 6, 384, 12, 2
Result = TypeVar("Result")


class Layer(nn.Module):
    """One layer of the encoder: attention and two Linear layers, each with a norm after it."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Runs it on (batch, length, width)."""
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        seen = scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.norm1(x + self.out(seen))
        out: Tensor = self.norm2(x + self.down(nn.functional.gelu(self.up(x))))
        return out


def timed(work: Callable[[], Result], device: torch.device, what: str) -> Result:
    """Runs `work` once and prints its seconds and, on CUDA, the peak of memory."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    line = f"{what:<44}{time.perf_counter() - start:>9.2f} s"
    if device.type == "cuda":
        line += f"{torch.cuda.max_memory_allocated() / 1e9:>9.2f} GB at most"
    print(line, flush=True)
    return result


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Classification of the first position, in bfloat16 on CUDA."""
    with torch.autocast("cuda", torch.bfloat16, enabled=batch[0].is_cuda):
        return cross_entropy(model(batch[0])[:, 0].float(), batch[1])


def parts_of_obs(data: Calibration, weights: Weights, count: int) -> None:
    """Prints the time of every part of one recomputation."""
    device = next(iter(weights.values())).device
    data.differentiate(weights, 1, lambda _: None)  # warm
    timed(lambda: data.differentiate(weights, count, lambda _: None), device, "gradients alone")
    fisher = Fisher(weights)
    timed(lambda: data.differentiate(weights, count, fisher.add), device, "gradients into F")
    fisher.finish()
    diagonals = timed(
        lambda: {name: fisher.inverse_diagonal(name, w) for name, w in weights.items()},
        device,
        "diagonal of the inverse",
    )
    scores = {name: (w / diagonals[name].sqrt()).float() for name, w in weights.items()}
    masks = timed(lambda: UniformTopK(0.7).select(scores), device, "selection")
    timed(
        lambda: [fisher.remove(name, w, masks[name]) for name, w in weights.items()],
        device,
        "update",
    )


def main() -> None:
    """Measures on one device."""
    parser = argparse.ArgumentParser(description="Times the pruners.")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, choices=["cpu", "cuda"])
    parser.add_argument("--gradients", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=384)
    given = parser.parse_args()
    device = torch.device(given.device)
    print(machine(device))
    torch.manual_seed(0)
    layers = [Layer() for _ in range(LAYERS)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)).to(device)
    inputs = torch.randn(given.batch, given.length, WIDTH, device=device)
    batch = inputs, torch.randint(CLASSES, (given.batch,), device=device)
    weights = compressible_weights(model, skip=rf"^{LAYERS}\.")
    count = sum(weight.numel() for weight in weights.values())
    print(f"{count / 1e6:.1f} M weights; batches of {given.batch} x {given.length}")
    batches, some = [batch] * given.gradients, [batch] * 8
    data = Calibration(model, batches, loss)

    pattern = UniformTopK(0.7)
    parts_of_obs(data, weights, given.gradients)
    every: list[tuple[Pruner, list[tuple[Tensor, Tensor]]]] = [
        (Obs(pattern, gradients=given.gradients, recomputations=1), batches),
        (Obs(pattern, gradients=given.gradients), batches),
        (Obs(NM(2, 4), gradients=given.gradients), batches),
        (Wanda(pattern), some),
        (SparseGPT(pattern), some),
        (SparseGPT(NM(2, 4)), some),
    ]
    for pruner, seen in every:
        steps = f", {pruner.recomputations} recomputations" if isinstance(pruner, Obs) else ""

        def work_() -> object:
            return prune_(model, pruner, seen, loss=loss, weights=weights)  # noqa: B023

        timed(work_, device, f"{pruner}{steps}, {len(seen)} batches")


if __name__ == "__main__":
    main()
