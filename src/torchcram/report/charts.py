"""Parts that all charts of a page share: points, axes, colours and the Pareto front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = 8  # number of colours in the style sheet
_FRONT = {"name": "Pareto front", "style": COLOURS - 1, "front": True}
_ROOM = 1.04  # length of an axis that ends right of its last point, relative to that point

Chart = dict[str, Any]
"""A chart as the script of the page reads it."""

Point = dict[str, Any]
"""A point of a series: x, a y and its standard deviation per view, and the text of its tooltip."""


def make_point(
    x: float,
    y: Sequence[float | None],
    text: Mapping[str, str],
    *,
    std: Sequence[float] | None = None,
) -> Point:
    """Returns a point of a chart.

    Args:
        x: Position along the horizontal axis.
        y: Position along the vertical axis, one for every view; None where a view leaves it out.
        text: Lines of the tooltip, by what they are.
        std: Standard deviations of `y`; by default there are none.
    """
    spread = [0] * len(y) if std is None else list(std)
    return {"x": x, "y": list(y), "std": spread, "text": list(map(list, text.items()))}


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the (cost, value) pairs that no other beats, in the order of cost.

    A pair is beaten by another that costs no more and is worth no less, and differs from it.
    """
    order = sorted(range(len(points)), key=lambda index: (points[index][0], -points[index][1]))
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front


def cost_chart(
    series: Mapping[str, Sequence[Point]],
    views: Sequence[str],
    cost: str,
    value: str,
    *,
    falls: bool = False,
    benefit: bool = False,
) -> Chart | None:
    """Returns value against cost as separate points, with the Pareto front of every view.

    Args:
        series: Points by the name of their series.
        views: Names of the views.
        cost: Label of the horizontal axis.
        value: Label of the vertical axis.
        falls: Whether less of the value is better.
        benefit: Whether more is better along the horizontal axis, as of tokens per second.

    Returns:
        The chart, or None if there are no points.
    """
    points = [point for members in series.values() for point in members]
    if not points:
        return None
    front, shown = [], []
    for view, name in enumerate(views):
        visible = [point for point in points if point["y"][view] is not None]
        up, right = -1 if falls else 1, -1 if benefit else 1
        best = pareto([(right * point["x"], up * point["y"][view]) for point in visible])
        front += [visible[index] for index in best]
        end = _ROOM * max((point["x"] for point in visible), default=1.0)
        axis = {"label": cost, "min": 0, "max": end, "least": 0}
        shown.append({"name": name, "label": value, "floor": None, "x": axis})
    return {
        "x": shown[0]["x"],
        "views": shown,
        "series": [
            *(
                {"name": name, "style": style, "points": members, "line": False}
                for style, (name, members) in enumerate(series.items())
                if members
            ),
            {**_FRONT, "points": front},
        ],
    }
