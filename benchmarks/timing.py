"""Timing and machine description shared by the benchmarks."""

from __future__ import annotations

import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def machine(device: torch.device) -> str:
    """Names the device, the processor and the versions that a figure was measured with."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        info = Path("/proc/cpuinfo")
        lines = info.read_text().splitlines() if info.exists() else []
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = f"{models[0] if models else platform.machine()}, {torch.get_num_threads()} threads"
    return f"{name}; torch {torch.__version__}; Python {platform.python_version()}"


def milliseconds(
    work: Callable[[], object], device: torch.device, *, repeats: int = 20, warmup: int = 3
) -> float:
    """Returns the median time of one call, the device drained before and after each."""
    for _ in range(warmup):
        work()
    times = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def captured_milliseconds(work: Callable[[], object], *, calls: int = 10) -> float:
    """Returns the time of one call on the GPU alone: out of several, replayed as a CUDA graph."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        for _ in range(calls):
            work()
    torch.cuda.synchronize()
    graph.replay()
    return milliseconds(graph.replay, torch.device("cuda"), repeats=5) / calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
