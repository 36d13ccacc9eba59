"""Numbers of benchmarks as text, and the models that no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torchcram.report.summary import percent, points

if TYPE_CHECKING:
    from torchcram.experiments.bench.record import Bench, ModelRecord

MEGA = 1e6


def ms(milliseconds: float) -> str:
    """Writes milliseconds with three digits that count: 0.123, 1.23, 123."""
    if milliseconds >= 100:
        return f"{milliseconds:.0f}"
    return f"{milliseconds:.{1 if milliseconds >= 10 else 2 if milliseconds >= 1 else 3}f}"


def size(count: int) -> str:
    """Writes bytes in MB, small ones with more digits."""
    millions = count / MEGA
    return f"{millions:.{1 if millions >= 10 else 2 if millions >= 1 else 3}f}"


def rate(per_second: float) -> str:
    """Writes how many there are in a second: 1.23, 12.3, 1,234."""
    return f"{per_second:,.{2 if per_second < 10 else 1 if per_second < 100 else 0}f}"


def times(ratio: float) -> str:
    """Writes a ratio: 2.31x, 12.3x."""
    return f"{ratio:.{1 if ratio >= 10 else 2}f}x"


def size_cells(bench: Bench, model: ModelRecord) -> list[str]:
    """Returns the accuracy of a model, its change, and the plain, compact and ONNX files.

    The ratio after the compact file is how much smaller it is than the plain one of the dense
    model.
    """
    dense, change = bench.subjects[0], ""
    if model is not dense and model.accuracy is not None and dense.accuracy is not None:
        change = points(model.accuracy - dense.accuracy)
    return [
        "" if model.accuracy is None else percent(model.accuracy),
        change,
        size(model.plain_bytes),
        size(model.compact_bytes),
        times(dense.plain_bytes / model.compact_bytes),
        "" if model.onnx_bytes is None else size(model.onnx_bytes),
    ]


def pareto(found: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the places of (cost, value) that no other beats, in the order of their cost.

    A point is beaten by one that costs no more and is worth no less, and is not the same in both.
    """
    order = sorted(range(len(found)), key=lambda place: (found[place][0], -found[place][1]))
    front: list[int] = []
    for place in order:
        if not front or found[place][1] > found[front[-1]][1]:
            front.append(place)
    return front
