"""Capturing CUDA graphs so that a capture that fails leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def captured(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: Any = None,  # noqa: ANN401
    stream: torch.cuda.Stream | None = None,
    error_mode: str = "global",
) -> Iterator[None]:
    """Captures the work of a `with` block in a graph.

    If torch cannot end a capture, the random generator of the device stays in the state that it has
    during a capture, and every later random number is an error. Another capture, which succeeds,
    puts it right.

    Args:
        graph: Graph to fill.
        pool: Memory pool to share with other graphs; None for a pool of its own.
        stream: Stream to capture on; None for the one that torch captures on.
        error_mode: Calls that are errors during the capture; see `torch.cuda.graph`.
    """
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
            yield
    except BaseException:
        with suppress(Exception):  # the first error is the one to report
            _end_capture_of_generator()
        raise


def _end_capture_of_generator() -> None:
    """Captures a graph that is never replayed, after which the generator works as before."""
    torch.cuda.synchronize()
    value = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        value.add_(1)
