"""What the charts of a benchmark show, as plain data for the script of the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torchcram.report.bench_summary import MEGA, ms, pareto, rate, size, times
from torchcram.report.runs import COLOURS
from torchcram.report.summary import percent

if TYPE_CHECKING:
    from torchcram.experiments.bench.record import Bench, ModelRecord, Timing

FRONT = {"name": "Pareto front", "style": COLOURS - 1, "front": True}
ROOM = 1.04  # to the right of the last point
FILES = {"compact file": "compact_bytes", "ONNX file": "onnx_bytes", "plain file": "plain_bytes"}

Point = dict[str, Any]


def latency_chart(bench: Bench) -> dict[str, Any] | None:
    """Returns accuracy against latency, a view per setting; None where no accuracy is known."""
    views = [f"batch {one.batch}" for one in bench.settings]
    if len({one.threads for one in bench.settings}) > 1:
        views = [str(one) for one in bench.settings]
    series: dict[str, list[Point]] = {name: [] for name in bench.engines}
    for timing in bench.timings:
        point = _latency_point(bench, timing)
        if point is not None:
            series[timing.engine].append(point)
    label = "latency in ms: the median over the rounds"
    return _chart(series, views, label, f"test {bench.metric}, %")


def size_chart(bench: Bench) -> dict[str, Any] | None:
    """Returns accuracy against the size of files; None where no accuracy is known."""
    series: dict[str, list[Point]] = {
        name: [
            _size_point(bench, model, name, getattr(model, key))
            for model in bench.subjects
            if model.accuracy is not None and getattr(model, key) is not None
        ]
        for name, key in FILES.items()
    }
    return _chart(series, ["file"], "size of the file in MB", f"test {bench.metric}, %")


def _chart(
    series: dict[str, list[Point]], views: Sequence[str], along: str, up: str
) -> dict[str, Any] | None:
    found = [point for points in series.values() for point in points]
    if not found:
        return None
    fronts, shown = [], []
    for place, name in enumerate(views):
        here = [point for point in found if point["y"][place] is not None]
        best = pareto([(point["x"], point["y"][place]) for point in here])
        fronts += [here[number] for number in best]
        most = ROOM * max((point["x"] for point in here), default=1.0)
        axis = {"label": along, "min": 0, "max": most, "least": 0}
        shown.append({"name": name, "label": up, "floor": None, "x": axis})
    return {
        "x": shown[0]["x"],
        "views": shown,
        "series": [
            *(
                {"name": name, "style": place, "points": points, "line": False}
                for place, (name, points) in enumerate(series.items())
                if points
            ),
            {**FRONT, "points": fronts},
        ],
    }


def _latency_point(bench: Bench, timing: Timing) -> Point | None:
    model = next(one for one in bench.subjects if one.target == timing.target)
    speed = bench.ratio(timing)
    if timing.times is None or model.accuracy is None:
        return None
    low, high = ms(timing.times.low), ms(timing.times.high)
    text = {
        "model": model.target,
        bench.metric: f"{percent(model.accuracy)} %",
        "latency": f"{ms(timing.times.median)} ms",
        "quartiles": f"{low} to {high} ms",
        f"{bench.unit}/s": rate(bench.per_second(timing) or 0),
        **({} if speed is None else {"speed": times(speed)}),
        **({"note": timing.note} if timing.note else {}),
    }
    count = len(bench.settings)
    y = [100 * model.accuracy if place == timing.setting else None for place in range(count)]
    return {
        "x": timing.times.median,
        "y": y,
        "std": [0] * count,
        "text": list(map(list, text.items())),
    }


def _size_point(bench: Bench, model: ModelRecord, name: str, count: int) -> Point:
    assert model.accuracy is not None  # noqa: S101
    text = {
        "model": model.target,
        bench.metric: f"{percent(model.accuracy)} %",
        name: f"{size(count)} MB",
        "smaller": times(bench.subjects[0].plain_bytes / count),
    }
    return {
        "x": count / MEGA,
        "y": [100 * model.accuracy],
        "std": [0],
        "text": list(map(list, text.items())),
    }
