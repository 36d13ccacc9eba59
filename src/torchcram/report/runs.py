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
from torchcram.experiments.metrics import less_is_better
from torchcram.experiments.recipe.overrides import DISTILLED, FINETUNE
from torchcram.experiments.tasks import ACCURACY
from torchcram.report import summary
from torchcram.report.bench import sections
from torchcram.report.charts import COLOURS, Chart, Point, make_point
from torchcram.report.sources import Log
from torchcram.report.summary import (
    MeanStd,
    TargetSummary,
    axis_label,
    change_text,
    in_percent,
    is_noticeable_loss,
    on_axis,
    percent_sign,
    score_text,
    std_on_axis,
)

FLOOR = -10.0  # points; what lost more leaves the frame, so that small changes can be seen


@dataclass(frozen=True)
class Run:
    """A result as the page shows it.

    Attributes:
        result: Result as it was read.
        label: Name of the run in charts and tables.
        style: Number of the colour, dashes and markers.
        dense: Accuracy of the models before compression.
        rows: Targets by operator.
        passes: Passes over the training set by operator, and of the dense model by "dense"; with
            those of fine-tuning after a plus.
    """

    result: Result
    label: str
    style: int
    dense: MeanStd
    rows: Mapping[str, TargetSummary]
    passes: Mapping[str, str]

    @property
    def trained_for(self) -> str | None:
        """Target that the model was trained sparse for; None for a dense model."""
        return summary.trained_for(self.result)

    @property
    def form(self) -> str:
        """What the model is before compression."""
        return "dense" if self.trained_for is None else "as trained"

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
        """Seeds, epochs, passes and minutes in words."""
        count = len(self.result.seeds)
        took = summary.duration(60 * summary.minutes(self.result))
        parts = [summary.counted(count, "seed"), *summary.cost_words(self.result)]
        return ", ".join([*parts, took + " each" * (count > 1)])

    @property
    def recipe(self) -> list[tuple[str, str]]:
        """The recipe as keys and values."""
        return [(key, _text(value)) for key, value in flat(self.result.recipe).items()]


@dataclass(frozen=True)
class Group:
    """The runs of one model on one task, which are comparable.

    Attributes:
        name: Task and model.
        data: Names of the datasets, where they differ from the name of the task.
        runs: Runs in the order they were given.
        targets: Targets of all runs.
    """

    name: str
    data: str
    runs: Sequence[Run]
    targets: Sequence[str]

    @property
    def metric(self) -> str:
        """The metric that models are tested by."""
        return " or ".join(dict.fromkeys(run.result.metric for run in self.runs))

    @property
    def ratios(self) -> bool:
        """Whether changes from dense are ratios, as those of perplexities are."""
        return less_is_better(self.metric)

    @property
    def tuned(self) -> bool:
        """Whether batch norm was tuned."""
        return any(summary.tuned(run.result) for run in self.runs)

    @property
    def finetuned(self) -> bool:
        """Whether some models were fine-tuned after compression."""
        return any(FINETUNE in run.result.method for run in self.runs)

    @property
    def trained_sparse(self) -> bool:
        """Whether some models were trained for one target."""
        return any(run.trained_for is not None for run in self.runs)

    @property
    def shown(self) -> Sequence[Run]:
        """The runs of charts and tables: a model fine-tuned at several targets counts as one."""
        merged: dict[object, Run] = {}
        for run in self.runs:
            method = run.result.method
            base, tuned, _ = method.partition(FINETUNE)
            key = (base, DISTILLED in method) if tuned else id(run)
            if key in merged and not merged[key].rows.keys() & run.rows.keys():
                label = run.result.title.rpartition(" at ")[0] or merged[key].label
                rows = {**merged[key].rows, **run.rows}
                passes = {**merged[key].passes, **run.passes}
                merged[key] = replace(merged[key], label=label, rows=rows, passes=passes)
            else:
                merged[key if key not in merged else id(run)] = run
        return list(merged.values())


def group_runs(results: Sequence[Result]) -> list[Group]:
    """Returns groups in the order of their first results; the same label has the same style."""
    together: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        together.setdefault((result.task, result.model), []).append(result)
    groups, styles = [], dict[str, int]()
    for (task, model), members in together.items():
        runs = [
            Run(
                result,
                label,
                styles.setdefault(label, len(styles)),
                summary.dense(result),
                summary.summaries(result),
                _passes(result, members),
            )
            for result, label in zip(members, summary.labels(members), strict=True)
        ]
        data = ", ".join(dict.fromkeys(result.data for result in members))
        data = "" if data == task else data  # which the heading says already
        operators = [operator for run in runs for operator in run.rows]
        operators += [run.trained_for for run in runs if run.trained_for is not None]
        targets = summary.sort_operators(operators)
        groups.append(Group(f"{task} / {model}", data, runs, targets))
    return groups


def _passes(result: Result, members: Sequence[Result]) -> dict[str, str]:
    """Returns the passes of a result by operator; `members` have what it was fine-tuned from."""
    base, finetuned, _ = result.method.partition(FINETUNE)
    dense, compressed = summary.passes(result), summary.passes(result)
    if finetuned:
        start = next((member for member in members if member.method == base), None)
        dense = "" if start is None else summary.passes(start)
        compressed = f"… + {compressed}" if start is None else summary.passes(start, [result])
    return {"dense": dense, **dict.fromkeys(summary.summaries(result), compressed)}


def _text(value: object) -> str:
    """Writes a value as recipes do, lists without brackets."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


# The page


def runs_page(
    results: Sequence[Result],
    *,
    title: str = "One training, every size",
    logs: Sequence[Log] = (),
    benches: Sequence[Bench] = (),
) -> str:
    """Renders the page.

    Args:
        results: Results, at least one; those of one task and model share a chart and a table.
        title: Heading of the page.
        logs: Logs of runs whose results these are; their curves have the same names and styles.
        benches: Benchmarks of runs, shown in a section of their own.

    Raises:
        ValueError: If there are no results, or a record of a log has no epoch.
    """
    if not results:
        raise ValueError("no results: a page needs at least one")
    groups = group_runs(results)
    charts = [accuracy_chart(group.shown) for group in groups]
    if logs:
        charts.append(training_chart([_curve(log, results, groups, logs) for log in logs]))
    bench_sections, bench_charts = sections(benches, len(charts))
    values = {
        "title": title,
        "groups": groups,
        "charts": [*charts, *bench_charts],
        "logs": bool(logs),
        "benches": bench_sections,
        "change_unit": _change_unit(groups),
        "repeated": [over for over in dict.fromkeys(map(summary.repeated, results)) if over],
    }
    environment = Environment(
        loader=PackageLoader("torchcram.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(
        in_percent=in_percent, score=score_text, change=change_text, duration=summary.duration
    )
    environment.tests.update(noticeable_loss=is_noticeable_loss)
    return environment.get_template("runs.html.j2").render(values)


def _change_unit(groups: Sequence[Group]) -> str:
    """Returns the unit of changes from dense, in words."""
    kinds = {group.ratios for group in groups}
    if len(kinds) > 1:
        return "in points, and for perplexities as a ratio"
    return "as a ratio" if True in kinds else "in points"


# Its charts


@dataclass(frozen=True)
class Curve:
    """The log of a run, and the name and the number of the style that it is shown by."""

    name: str
    style: int
    records: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class _Metric:
    """A value of the log: its name, its axis, its position there, and its format."""

    name: str
    axis: str
    position: Callable[[float], float] = float
    written: Callable[[float], str] = "{:.4f}".format


def _metrics(measured: str) -> dict[str, _Metric]:
    """Returns what is shown of records, by key; `measured` is the metric of the task."""

    def position(value: float) -> float:
        return on_axis(value, measured)

    def written(value: float) -> str:
        return score_text(value, measured) + percent_sign(measured)

    return {
        "accuracy": _Metric(measured, axis_label(measured), position, written),
        "compressed_accuracy": _Metric(
            f"compressed {measured}", axis_label(measured, " when compressed"), position, written
        ),
        "loss": _Metric("loss", "training loss at the weights"),
        "compressed_loss": _Metric("compressed loss", "training loss at the compressed weights"),
        "lr": _Metric("lr", "learning rate", written="{:.4g}".format),
    }


def accuracy_chart(runs: Sequence[Run]) -> Chart:
    """Returns the metric, after tuning if any, against sparsity, and its change from dense.

    Only targets of global sparsity, and of uniform sparsity for language models, where all layers
    are alike: the others are not comparable along one axis.
    """
    metric = " or ".join(dict.fromkeys(run.result.metric for run in runs))
    after = " after BNT" if any(summary.tuned(run.result) for run in runs) else ""
    unit, floor = ("ratio, log10", None) if less_is_better(metric) else ("points", FLOOR)
    return {
        "x": {"label": "weights set to zero in one shot, %", "min": 0, "max": 100, "least": 0},
        "views": [
            {"name": metric, "label": axis_label(metric, after), "floor": None},
            {"name": "change from dense", "label": f"change from dense, {unit}", "floor": floor},
        ],
        "series": [{"name": run.label, "style": run.style, "points": _points(run)} for run in runs],
    }


def _points(run: Run) -> list[Point]:
    """Returns the model before compression and the pruned ones; the former may be sparse."""
    metric = run.result.metric
    sign, shown = percent_sign(metric), []
    if run.trained_for is None or summary.on_the_axis(run.result, run.trained_for):
        score = run.dense if run.trained_for is None else summary.trained_score(run.result)
        shown.append(
            make_point(
                100 * _sparsity(run),
                [on_axis(score.mean, metric), 0],
                {"operator": run.trained_for or "dense", metric: f"{score}{sign}"},
                std=[std_on_axis(score), 0],
            )
        )
    pruned = [
        row
        for row in run.rows.values()
        if row.operator != run.trained_for and summary.on_the_axis(run.result, row.operator)
    ]
    for row in sorted(pruned, key=lambda row: row.sparsity):
        measured = {metric: f"{row.after}{sign}"}
        if summary.tuned(run.result):
            before = f"{score_text(row.before.mean, metric)}{sign}"
            measured = {"before BNT": before, "after BNT": f"{row.after}{sign}"}
        text = {
            "operator": row.operator,
            **measured,
            "change from dense": change_text(row.change.mean, metric),
        }
        shown.append(
            make_point(
                100 * row.sparsity,
                [on_axis(value.mean, metric) for value in (row.after, row.change)],
                text,
                std=[std_on_axis(value) for value in (row.after, row.change)],
            )
        )
    return shown


def _sparsity(run: Run) -> float:
    """Returns the fraction of zeros in the compressible weights before compression."""
    if run.trained_for is None:
        return 0
    row = run.rows.get(run.trained_for)
    return summary.sparsity(run.trained_for) or 0 if row is None else row.sparsity


def training_chart(curves: Sequence[Curve]) -> Chart:
    """Returns what was logged, by epoch."""
    # a run that was killed and went on may have logged an epoch twice: the later counts
    by_epoch = [_by_epoch(curve) for curve in curves]
    records = [record for logged in by_epoch for record in logged.values()]
    measured = " or ".join(dict.fromkeys(_measured(record) for record in records))
    shown = {
        key: metric
        for key, metric in _metrics(measured).items()
        if any(_number(record, key) is not None for record in records)
    }
    last = max((epoch for logged in by_epoch for epoch in logged), default=1)
    return {
        "x": {"label": "epoch", "min": 0, "max": max(last, 1), "least": 1},
        "views": [
            {"name": metric.name, "label": metric.axis, "floor": None} for metric in shown.values()
        ],
        "series": [
            {
                "name": curve.name,
                "style": curve.style,
                "points": [_epoch_point(epoch, logged[epoch], shown) for epoch in sorted(logged)],
            }
            for curve, logged in zip(curves, by_epoch, strict=True)
        ],
    }


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


def _by_epoch(curve: Curve) -> dict[int, Mapping[str, Any]]:
    logged = {}
    for index, record in enumerate(curve.records):
        epoch = record.get("epoch")
        if not isinstance(epoch, int):
            raise ValueError(f"{curve.name}: record {index} of the log has epoch={epoch!r}")
        logged[epoch] = record
    return logged


def _epoch_point(epoch: int, record: Mapping[str, Any], shown: Mapping[str, _Metric]) -> Point:
    values = {key: _number(record, key) for key in shown}
    named = _metrics(_measured(record))
    text = {"epoch": str(epoch)}
    for key, value in values.items():
        if value is not None:
            text[named[key].name] = named[key].written(value)
    y = [None if value is None else named[key].position(value) for key, value in values.items()]
    return make_point(epoch, y, text)


def _measured(record: Mapping[str, Any]) -> str:
    return str(record.get("metric", ACCURACY))


def _number(record: Mapping[str, Any], key: str) -> float | None:
    """Returns a value; None where it is missing or not finite."""
    value = record.get(key)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value
