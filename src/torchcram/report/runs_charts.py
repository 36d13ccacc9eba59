"""What the charts of a page of runs show, as plain data for its script."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchcram.experiments.tasks import ACCURACY
from torchcram.report.runs import Run
from torchcram.report.summary import MeanStd, on_the_axis, percent, points, tuned

FLOOR = -10.0  # points; what lost more leaves the frame, so that small changes can be seen


@dataclass(frozen=True)
class _Metric:
    """A value of the log: its name, its axis, the factor to its unit, how it is written."""

    name: str
    axis: str
    factor: float = 1
    written: str = "{:.4f}"


@dataclass(frozen=True)
class Curve:
    """The log of a run, and the name and the number of the style that it is shown by."""

    name: str
    style: int
    records: Sequence[Mapping[str, Any]]


def _metrics(measured: str) -> dict[str, _Metric]:
    """Returns what is shown of records, by key; `measured` is what models are tested by."""
    share = "{:.2f} %"
    return {
        "accuracy": _Metric(measured, f"test {measured}, %", 100, share),
        "compressed_accuracy": _Metric(
            f"compressed {measured}", f"test {measured} when compressed, %", 100, share
        ),
        "loss": _Metric("loss", "training loss at the weights"),
        "compressed_loss": _Metric("compressed loss", "training loss at the compressed weights"),
        "lr": _Metric("lr", "learning rate", written="{:.4g}"),
    }


def accuracy_chart(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the metric, after tuning if any, against sparsity, and its change from dense.

    Only targets of global sparsity, and of uniform sparsity for language models, where all layers
    are alike: the others are not comparable along one axis.
    """
    metric = " or ".join(dict.fromkeys(run.result.metric for run in runs))
    after = " after BNT" if any(tuned(run.result) for run in runs) else ""
    return {
        "x": {"label": "weights set to zero in one shot, %", "min": 0, "max": 100, "least": 0},
        "views": [
            {"name": metric, "label": f"test {metric}{after}, %", "floor": None},
            {"name": "change from dense", "label": "change from dense, points", "floor": FLOOR},
        ],
        "series": [{"name": run.label, "style": run.style, "points": _points(run)} for run in runs],
    }


def training_chart(curves: Sequence[Curve]) -> dict[str, Any]:
    """Returns what was logged, by epoch."""
    # a run that was killed and went on may have logged an epoch twice: the later counts
    by_epoch = [_by_epoch(curve) for curve in curves]
    records = [record for found in by_epoch for record in found.values()]
    measured = " or ".join(dict.fromkeys(_measured(record) for record in records))
    shown = {
        key: metric
        for key, metric in _metrics(measured).items()
        if any(_number(record, key, metric) is not None for record in records)
    }
    last = max((epoch for found in by_epoch for epoch in found), default=1)
    return {
        "x": {"label": "epoch", "min": 0, "max": max(last, 1), "least": 1},
        "views": [
            {"name": metric.name, "label": metric.axis, "floor": None} for metric in shown.values()
        ],
        "series": [
            {
                "name": curve.name,
                "style": curve.style,
                "points": [_logged(epoch, found[epoch], shown) for epoch in sorted(found)],
            }
            for curve, found in zip(curves, by_epoch, strict=True)
        ],
    }


def _points(run: Run) -> list[dict[str, Any]]:
    """Returns the dense model and the pruned ones; the text is what pointing at them shows."""
    found = [
        {
            "x": 0,
            "y": [100 * run.dense.mean, 0],
            "std": [100 * (run.dense.std or 0), 0],
            "text": [["operator", "dense"], [run.result.metric, _percent(run.dense)]],
        }
    ]
    pruned = [row for row in run.rows.values() if on_the_axis(run.result, row.operator)]
    for row in sorted(pruned, key=lambda row: row.sparsity):
        measured = {run.result.metric: _percent(row.after)}
        if tuned(run.result):
            before = f"{percent(row.before.mean)} %"
            measured = {"before BNT": before, "after BNT": _percent(row.after)}
        text = {
            "operator": row.operator,
            **measured,
            "change from dense": points(row.change.mean),
        }
        found.append(
            {
                "x": 100 * row.sparsity,
                "y": [100 * row.after.mean, 100 * row.change.mean],
                "std": [100 * (row.after.std or 0), 100 * (row.change.std or 0)],
                "text": list(map(list, text.items())),
            }
        )
    return found


def _percent(value: MeanStd) -> str:
    return f"{value} %"


def _by_epoch(curve: Curve) -> dict[int, Mapping[str, Any]]:
    found = {}
    for place, record in enumerate(curve.records):
        epoch = record.get("epoch")
        if not isinstance(epoch, int):
            raise ValueError(f"{curve.name}: record {place} of the log has epoch={epoch!r}")
        found[epoch] = record
    return found


def _logged(epoch: int, record: Mapping[str, Any], shown: Mapping[str, _Metric]) -> dict[str, Any]:
    values = {key: _number(record, key, metric) for key, metric in shown.items()}
    named = _metrics(_measured(record))
    text = [["epoch", str(epoch)]]
    for key, value in values.items():
        if value is not None:
            text.append([named[key].name, named[key].written.format(value)])
    return {"x": epoch, "y": list(values.values()), "std": [0] * len(shown), "text": text}


def _measured(record: Mapping[str, Any]) -> str:
    return str(record.get("metric", ACCURACY))


def _number(record: Mapping[str, Any], key: str, metric: _Metric) -> float | None:
    """Returns a value in the unit of its axis; None where it is missing or not finite."""
    value = record.get(key)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return metric.factor * value
