"""Time on the GPU alone."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

CACHE = 128 * 2**20  # bytes, more than a GPU keeps of the weights of the last run
MOST = 64  # copies of a layer
BUDGET = 30.0  # milliseconds that one measurement may take


def count_copies(weight_bytes: int) -> int:
    """Returns how many copies of a layer to run in turn, for its weights to come from memory.

    In a model they do, too: by the time a layer runs again, the others have taken its place.
    """
    return max(1, min(MOST, -(-CACHE // max(weight_bytes, 1))))


@torch.no_grad()
def gpu_milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Returns the time of one call: the median of several replays of all, as a CUDA graph.

    Args:
        calls: to run one after another. Where all of them take longer than the budget, they are
            run once, without a graph.
    """
    calls[0]()  # compiles and chooses
    torch.cuda.synchronize()
    first = _elapsed(calls[0])
    if first > BUDGET:
        return first
    calls = calls[: max(1, int(BUDGET / max(first, 1e-3)))]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    one = _elapsed(graph.replay)
    repeats = max(3, min(20, int(BUDGET / max(one, 1e-3))))
    return statistics.median(_elapsed(graph.replay) for _ in range(repeats)) / len(calls)


def _elapsed(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))
