"""Capturing CUDA graphs; after a capture that fails, the device can be used as before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch


@contextmanager
def capturing(
    graph: torch.cuda.CUDAGraph,
    *,
    pool: Any = None,  # noqa: ANN401
    stream: torch.cuda.Stream | None = None,
    error_mode: str = "global",
) -> Iterator[None]:
    """Captures the work of a `with` block in a graph.

    If torch cannot end a capture, some versions leave the stream of the capture as the current one,
    and the random generator in the state that it has during a capture, in which every later random
    number is an error. Both are put right here, the generator by another capture.

    Args:
        graph: Graph to fill.
        pool: Memory pool to share with other graphs; None for a pool of its own.
        stream: Stream to capture on; None for the one that torch captures on.
        error_mode: Calls that are errors during the capture; see `torch.cuda.graph`.
    """
    before = torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=error_mode):
            yield
    except BaseException:
        torch.cuda.set_stream(before)
        with suppress(Exception):  # the first error is the one to report
            _end_capture_of_generator()
        raise


def _end_capture_of_generator() -> None:
    """Captures a graph that is never replayed, after which the generator works as before."""
    torch.cuda.synchronize()
    value = torch.zeros(1, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="relaxed"):
        value.add_(1)
