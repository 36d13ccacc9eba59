"""Training over several processes: CrAM+ against the plain step, by DDP and by FSDP2.

    python benchmarks/distributed.py [--processes 1 2 4] [--rounds N]
    python benchmarks/distributed.py --selection [--device cpu|cuda] [--most 10000000000]

The first prints time and peak memory of a step of a small decoder on the CPU (processes talk by
gloo), AdamW, in float32. The second prints how many bytes a process sends to find the masks of
`global:0.9` over all shards of a model, and how long that takes where one process works on its
shard alone: the other shards are made up from it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import statistics
import tempfile
import time
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
from decoder import Decoder
from timing import machine, milliseconds
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from torchcram import CrAM
from torchcram.selection import Shards, count_kept, keep_largest

OPERATORS = ["global:0.5", "global:0.7", "global:0.8", "global:0.9", "global:0.95"]
METHODS = ("plain", "CrAM+")
WIDTH, DEPTH, HEADS, VOCABULARY, BATCH, TOKENS = 512, 4, 8, 4096, 4, 64


class Run:
    """One process's share of a training."""

    def __init__(self, how: str, method: str) -> None:
        torch.manual_seed(0)
        model: nn.Module = Decoder(WIDTH, DEPTH, heads=HEADS, vocabulary=VOCABULARY)
        if how == "FSDP2":
            for block in model.blocks:  # type: ignore[union-attr]
                fully_shard(block)
            fully_shard(model)
        else:
            model = DistributedDataParallel(model)
        self.model = model
        base = AdamW(model.parameters(), lr=1e-4)
        self.optimizer: Optimizer = base
        if method != "plain":
            self.optimizer = CrAM(model, base, OPERATORS, rho=0.01)
        self.tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))

    def closure(self) -> Tensor:
        """The loss of the batch, with gradients."""
        self.optimizer.zero_grad()
        scores = self.model(self.tokens[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def milliseconds(self, steps: int) -> float:
        """The mean time of a step until all processes have taken it."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            self.optimizer.step(self.closure)  # type: ignore[arg-type]
        dist.barrier()
        return 1000 * (time.perf_counter() - start) / steps


def _join(rank: int, processes: int, meet: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=processes)


def _times(rank: int, processes: int, meet: str, how: str, rounds: int) -> dict[str, list[float]]:
    _join(rank, processes, meet)
    runs = {method: Run(how, method) for method in METHODS}
    for run in runs.values():
        run.milliseconds(2)  # warms up
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(rounds):
        for method, run in runs.items():
            found[method].append(run.milliseconds(3))
    dist.destroy_process_group()
    return found


def _peak(rank: int, processes: int, meet: str, how: str, method: str) -> float:
    """The most megabytes that this process ever held."""
    _join(rank, processes, meet)
    Run(how, method).milliseconds(3)
    dist.destroy_process_group()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _in_processes(function: object, processes: int, *arguments: object) -> list[object]:
    """Calls `function(rank, processes, meet, *arguments)` in so many new processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, ThreadPool(processes) as threads:
        meet = (Path(folder) / "meet").as_uri()

        def call(rank: int) -> object:
            with context.Pool(1) as one:
                return one.apply(function, (rank, processes, meet, *arguments))  # type: ignore[arg-type]

        return threads.map(call, range(processes))


def steps(counts: list[int], rounds: int) -> None:
    """Prints a row per way to spread the model and number of processes."""
    model = Decoder(WIDTH, DEPTH, heads=HEADS, vocabulary=VOCABULARY)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(f"decoder of {millions:.1f} M parameters, {BATCH} x {TOKENS} tokens a process, 1 thread")
    print(f"{'':<22}{'plain':>12}{'CrAM+':>12}{'ratio':>8}{'plain':>12}{'CrAM+':>12}")
    for how in ("DDP", "FSDP2"):
        for count in counts:
            found = _in_processes(_times, count, how, rounds)[0]
            times = [statistics.median(found[method]) for method in METHODS]  # type: ignore[index]
            peaks = [max(_in_processes(_peak, count, how, method)) for method in METHODS]  # type: ignore[type-var]
            print(
                f"{how + ', ' + str(count) + (' process' if count == 1 else ' processes'):<22}"
                + "".join(f"{time:>9.0f} ms" for time in times)
                + f"{times[1] / times[0]:>8.2f}"
                + "".join(f"{peak:>9.0f} MB" for peak in peaks),
                flush=True,
            )


def selection(most: int, device: torch.device, sizes: tuple[int, ...] = (8, 512)) -> None:
    """Prints a row per number of weights and of processes."""
    print(f"{'weights':>14}{'processes':>11}{'a shard':>14}{'rounds':>8}{'bytes':>10}{'ms':>10}")
    total = 10**6
    while total <= most:
        for processes in sizes:
            shard = [torch.randn(n, device=device) for n in _layers(total // processes)]
            sent: list[int] = []

            def add_up(counts: Tensor, sent: list[int] = sent, times: int = processes) -> None:
                sent.append(counts.numel() * counts.element_size())
                counts.mul_(times)  # as if all shards were alike

            shards = Shards(0, processes, add_up)
            held = processes * sum(tensor.numel() for tensor in shard)
            keep = count_kept(held, 0.9)
            work = partial(keep_largest, shard, keep, shards=shards)
            taken = milliseconds(work, device, repeats=3, warmup=1)
            calls = 4  # of which each sent the same
            print(
                f"{held:>14,}{processes:>11}{held // processes:>14,}{len(sent) // calls:>8}"
                f"{sum(sent) // calls:>10,}{taken:>10.1f}",
                flush=True,
            )
        total *= 10


def _layers(count: int, largest: int = 4 * 4096 * 4096) -> list[int]:
    """Cuts so many weights into tensors as large as those of a 7 B decoder."""
    full, rest = divmod(count, largest)
    return [largest] * full + ([rest] if rest else [])


def main() -> None:
    """Prints one of the tables."""
    parser = argparse.ArgumentParser(description="Times training over several processes.")
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--selection", action="store_true", help="what selection sends")
    parser.add_argument("--most", type=int, default=10**9, help="weights of the largest model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of the selection")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    print(machine(device), flush=True)
    if arguments.selection:
        selection(arguments.most, device)
    else:
        steps(arguments.processes, arguments.rounds)


if __name__ == "__main__":
    main()
