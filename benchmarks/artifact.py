"""Sizes and loading times of compact files against plain safetensors, in the same run.

    python benchmarks/artifact.py [--layers N] [--repeats N] [--threads N] [--folder DIR]

Linear layers of the shapes of BERT-base, or convolutions of those of ResNet50, with random weights:
neither size nor time depends on them otherwise. A plain load reads the file of the same model
before compression. Both end in tensors of their own memory, or in the parameters of a model.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from timing import machine
from torch import nn

from torchcram import artifact, compress

WIDTH = 768
OPERATORS = (
    *("global:0.5", "global:0.9", "global:0.95", "nm:2:4", "int8", "int4", "int4:g64"),
    *("global:0.9+int8", "global:0.9+int4", "nm:2:4+int4"),
)


def encoder(layers: int) -> nn.Module:
    """Returns the Linear layers of so many layers of BERT-base, 7.1 M weights each."""
    shapes = [(WIDTH, WIDTH)] * 4 + [(WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)]
    return nn.ModuleList(nn.Linear(*shape) for _ in range(layers) for shape in shapes)


def convolutions(blocks: int) -> nn.Module:
    """Returns so many blocks of the last stage of ResNet50, 4.5 M weights each."""
    shapes = [(2048, 512, 1), (512, 512, 3), (512, 2048, 1)]
    return nn.ModuleList(nn.Conv2d(*shape, bias=False) for _ in range(blocks) for shape in shapes)


def interleaved(works: list[Callable[[], object]], repeats: int) -> list[float]:
    """Returns the best seconds of each, taken in turns: other programs only ever add to them."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, found in zip(works, times, strict=True):
            start = time.perf_counter()
            work()
            if turn:  # the first one warms up
                found.append(time.perf_counter() - start)
    return [min(found) for found in times]


def measure(model: nn.Module, operator: str, folder: Path, *, repeats: int) -> None:
    """Prints a row for one operator."""
    plain, compact = folder / "plain.safetensors", folder / "compact.safetensors"
    start = time.perf_counter()
    manifest = artifact.save(compress(model, operator), compact, operator=operator)
    saving = time.perf_counter() - start
    count, twin = sum(value.numel() for value in model.parameters()), copy.deepcopy(model)
    seconds = interleaved(
        [
            lambda: {name: value.clone() for name, value in load_file(plain).items()},
            lambda: artifact.load(compact),
            lambda: twin.load_state_dict(load_file(plain)),
            lambda: artifact.load(compact, twin),
        ],
        repeats,
    )
    kinds = {str(entry.encoding) for entry in manifest.tensors.values() if len(entry.shape) > 1}
    print(
        f"{operator:<16} {', '.join(sorted(kinds)):<18} {compact.stat().st_size / count:6.3f} "
        f"{seconds[1] * 1e3:8.0f} {seconds[0] * 1e3:8.0f} {seconds[0] / seconds[1]:7.2f} "
        f"{seconds[3] * 1e3:8.0f} {seconds[2] * 1e3:8.0f} {seconds[2] / seconds[3]:7.2f} "
        f"{count / seconds[1] / 1e6:8.0f} {saving:7.1f}",
        flush=True,
    )


def main() -> None:
    """Measures all operators on both models."""
    parser = argparse.ArgumentParser(description="Sizes and loading times of compact files.")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(machine(torch.device("cpu")))
    for title, model in (
        ("Linear", encoder(given.layers)),
        ("convolutions", convolutions(given.layers)),
    ):
        count = sum(value.numel() for value in model.parameters())
        print(f"\n{title}, {count / 1e6:.1f} M weights; ms as a state dict, and into a model")
        print(
            f"{'operator':<16} {'stored as':<18} {'B/w':>6} {'ours':>8} {'plain':>8} {'speed':>7} "
            f"{'ours':>8} {'plain':>8} {'speed':>7} {'M w/s':>8} {'save s':>7}"
        )
        with tempfile.TemporaryDirectory(dir=given.folder) as name:
            save_file(dict(model.state_dict()), Path(name) / "plain.safetensors")
            for operator in OPERATORS:
                measure(model, operator, Path(name), repeats=given.repeats)


if __name__ == "__main__":
    main()
