"""What the charts of a page of runs show, as plain data for its script."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchcram.report.runs import Run
from torchcram.report.summary import Spread, global_sparsity, percent, points

FLOOR = -10.0  # points; what lost more leaves the frame, so that small changes can be seen


@dataclass(frozen=True)
class _Metric:
    """A value of the log: its name, its axis, the factor to its unit, how it is written."""

    name: str
    axis: str
    factor: float = 1
    written: str = "{:.4f}"


METRICS = {
    "accuracy": _Metric("accuracy", "test accuracy, %", 100, "{:.2f} %"),
    "loss": _Metric("loss", "training loss at the weights"),
    "compressed_loss": _Metric("compressed loss", "training loss at the compressed weights"),
    "lr": _Metric("lr", "learning rate", written="{:.4g}"),
}


def accuracy_chart(runs: Sequence[Run]) -> dict[str, Any]:
    """Returns accuracy after tuning against sparsity, and its change from dense.

    Only targets of global sparsity: the others are not comparable along one axis.
    """
    return {
        "x": {"label": "weights set to zero in one shot, %", "min": 0, "max": 100, "least": 0},
        "views": [
            {"name": "accuracy", "label": "test accuracy after BNT, %", "floor": None},
            {"name": "change from dense", "label": "change from dense, points", "floor": FLOOR},
        ],
        "series": [{"name": run.label, "style": run.style, "points": _points(run)} for run in runs],
    }


def training_chart(
    logs: Mapping[str, Sequence[Mapping[str, Any]]], styles: Mapping[str, int]
) -> dict[str, Any]:
    """Returns what was logged, by epoch.

    Args:
        logs: records by the title of the run.
        styles: of titles that stand elsewhere on the page; the others get further ones.
    """
    # a run that was killed and went on may have logged an epoch twice: the later counts
    by_epoch = {title: _by_epoch(title, records) for title, records in logs.items()}
    shown = [key for key in METRICS if any(_number(r, key) is not None for r in _all(by_epoch))]
    last = max((epoch for records in by_epoch.values() for epoch in records), default=1)
    free = itertools.count(max(styles.values(), default=-1) + 1)
    return {
        "x": {"label": "epoch", "min": 0, "max": max(last, 1), "least": 1},
        "views": [
            {"name": METRICS[key].name, "label": METRICS[key].axis, "floor": None} for key in shown
        ],
        "series": [
            {
                "name": title,
                "style": styles[title] if title in styles else next(free),
                "points": [_logged(epoch, records[epoch], shown) for epoch in sorted(records)],
            }
            for title, records in by_epoch.items()
        ],
    }


def _points(run: Run) -> list[dict[str, Any]]:
    """Returns the dense model and the pruned ones; the text is what pointing at them shows."""
    found = [
        {
            "x": 0,
            "y": [100 * run.dense.mean, 0],
            "std": [100 * (run.dense.std or 0), 0],
            "text": [["operator", "dense"], ["accuracy", _percent(run.dense)]],
        }
    ]
    pruned = [row for row in run.rows.values() if global_sparsity(row.operator)]
    for row in sorted(pruned, key=lambda row: row.sparsity):
        text = {
            "operator": row.operator,
            "before BNT": f"{percent(row.before.mean)} %",
            "after BNT": _percent(row.after),
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


def _percent(value: Spread) -> str:
    return f"{value} %"


def _by_epoch(title: str, records: Sequence[Mapping[str, Any]]) -> dict[int, Mapping[str, Any]]:
    found = {}
    for place, record in enumerate(records):
        epoch = record.get("epoch")
        if not isinstance(epoch, int):
            raise ValueError(f"{title}: record {place} of the log has epoch={epoch!r}")
        found[epoch] = record
    return found


def _all(by_epoch: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    return [record for records in by_epoch.values() for record in records.values()]


def _logged(epoch: int, record: Mapping[str, Any], shown: Sequence[str]) -> dict[str, Any]:
    values = {key: _number(record, key) for key in shown}
    text = [["epoch", str(epoch)]]
    for key, value in values.items():
        if value is not None:
            text.append([METRICS[key].name, METRICS[key].written.format(value)])
    return {"x": epoch, "y": list(values.values()), "std": [0] * len(shown), "text": text}


def _number(record: Mapping[str, Any], key: str) -> float | None:
    """Returns a value in the unit of its axis; None where it is missing or not finite."""
    value = record.get(key)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return METRICS[key].factor * value
