"""Runs as one HTML page that needs nothing else: charts, tables, training curves, settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from torchcram.experiments.bench.record import Bench
from torchcram.experiments.evaluation.results import Result
from torchcram.experiments.io.dict_diff import flat
from torchcram.experiments.recipe.overrides import DISTILLED, FINETUNE
from torchcram.experiments.tasks.score import ACCURACY
from torchcram.report import summary
from torchcram.report.bench import sections
from torchcram.report.sources import Log
from torchcram.report.summary import (
    MeanStd,
    TargetSummary,
    duration,
    on_the_axis,
    percent,
    points,
    repeated,
    tuned,
)
from torchcram.report.table import NOTICEABLE

COLOURS = 8  # that the style sheet has


@dataclass(frozen=True)
class Run:
    """A result as the page shows it.

    Attributes:
        result: as it was read.
        label: its name in charts and tables.
        style: number of its colour, dashes and markers.
        dense: accuracy of the uncompressed models.
        rows: its targets by operator.
    """

    result: Result
    label: str
    style: int
    dense: MeanStd
    rows: Mapping[str, TargetSummary]

    @property
    def colour(self) -> int:
        """The number of its colour."""
        return self.style % COLOURS

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return f"{self.result.task}/{self.result.model}/{self.result.method}"

    @property
    def made(self) -> str:
        """Seeds, epochs and minutes in words."""
        count, epochs = len(self.result.seeds), summary.epochs(self.result)
        took = summary.duration(60 * summary.minutes(self.result))
        parts = [summary.counted(count, "seed")]
        parts += [f"{epochs} epochs"] if epochs else []
        parts += [took + " each" * (count > 1)]
        return ", ".join(parts)

    @property
    def recipe(self) -> list[tuple[str, str]]:
        """The recipe as keys and values."""
        return [(key, _text(value)) for key, value in flat(self.result.recipe).items()]


@dataclass(frozen=True)
class Group:
    """The runs of one model on one task, which are comparable.

    Attributes:
        name: task and model.
        data: names of the data sets, where they are not the name of the task.
        runs: in the order they were given.
        targets: of all runs.
    """

    name: str
    data: str
    runs: Sequence[Run]
    targets: Sequence[str]

    @property
    def metric(self) -> str:
        """What models are tested by."""
        return " or ".join(dict.fromkeys(run.result.metric for run in self.runs))

    @property
    def tuned(self) -> bool:
        """Whether batch norm was tuned."""
        return any(summary.tuned(run.result) for run in self.runs)

    @property
    def finetuned(self) -> bool:
        """Whether some were trained on after they were compressed."""
        return any(FINETUNE in run.result.method for run in self.runs)

    @property
    def shown(self) -> Sequence[Run]:
        """The runs of charts and tables: a model that was fine-tuned at several targets is one."""
        found: dict[object, Run] = {}
        for run in self.runs:
            method = run.result.method
            base, tuned, _ = method.partition(FINETUNE)
            key = (base, DISTILLED in method) if tuned else id(run)
            if key in found and not found[key].rows.keys() & run.rows.keys():
                label = run.result.title.rpartition(" at ")[0] or found[key].label
                rows = {**found[key].rows, **run.rows}
                found[key] = replace(found[key], label=label, rows=rows)
            else:
                found[key if key not in found else id(run)] = run
        return list(found.values())


def group_runs(results: Sequence[Result]) -> list[Group]:
    """Returns groups in the order of their first results; the same label has the same style."""
    together: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        together.setdefault((result.task, result.model), []).append(result)
    groups, styles = [], dict[str, int]()
    for (task, model), members in together.items():
        runs = [
            Run(one, label, styles.setdefault(label, len(styles)), summary.dense(one), rows)
            for one, label in zip(members, summary.labels(members), strict=True)
            for rows in [summary.summaries(one)]
        ]
        data = ", ".join(dict.fromkeys(one.data for one in members))
        data = "" if data == task else data  # which the heading says already
        targets = summary.sort_operators(operator for run in runs for operator in run.rows)
        groups.append(Group(f"{task} / {model}", data, runs, targets))
    return groups


def _text(value: object) -> str:
    """Writes a value as recipes do, lists without brackets."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


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


def runs_page(
    results: Sequence[Result],
    *,
    title: str = "One training, every size",
    logs: Sequence[Log] = (),
    benches: Sequence[Bench] = (),
) -> str:
    """Renders the page.

    Args:
        results: at least one; those of the same task and model share a chart and a table.
        title: heads the page.
        logs: of runs whose results these are; their curves have the same names and looks.
        benches: that runs were measured by, shown in a section of their own.

    Raises:
        ValueError: if there are no results, or a record has no epoch.
    """
    if not results:
        raise ValueError("no results: a page needs at least one")
    groups = group_runs(results)
    charts = [accuracy_chart(group.shown) for group in groups]
    if logs:
        charts.append(training_chart([_curve(log, results, groups, logs) for log in logs]))
    measured, further = sections(benches, len(charts))
    charts += further
    values = {
        "title": title,
        "groups": groups,
        "charts": charts,
        "logs": bool(logs),
        "benches": measured,
        "noticeable": NOTICEABLE,
        "repeated": [over for over in dict.fromkeys(map(repeated, results)) if over],
    }
    filters = {"percent": percent, "points": points, "duration": duration}
    return render("runs.html.j2", values, filters=filters)


def _curve(
    log: Log, results: Sequence[Result], groups: Sequence[Group], logs: Sequence[Log]
) -> Curve:
    group, run = next(
        (group, run) for group in groups for run in group.runs if run.result is results[log.result]
    )
    name = f"{group.name}: {run.label}" if len(groups) > 1 else run.label
    if [other.result for other in logs].count(log.result) > 1:
        name += f", seed {log.seed}"
    return Curve(name, run.style, log.records)


def render(
    template: str, values: Mapping[str, object], *, filters: Mapping[str, Callable[..., str]]
) -> str:
    """Fills a template of this package; all values are escaped, a missing one is an error.

    Args:
        template: name of the file.
        values: by the names that the template has them by.
        filters: likewise.
    """
    environment = Environment(
        loader=PackageLoader("torchcram.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(filters)
    return environment.get_template(template).render(values)
