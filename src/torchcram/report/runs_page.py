"""Several runs as one HTML page that needs nothing else: charts to point at, tables, settings."""

from __future__ import annotations

from collections.abc import Sequence

from torchcram.experiments.bench.record import Bench
from torchcram.experiments.evaluation.results import Result
from torchcram.report.bench_section import sections
from torchcram.report.runs import Group, group_runs
from torchcram.report.runs_charts import Curve, accuracy_chart, training_chart
from torchcram.report.sources import Log
from torchcram.report.summary import duration, percent, points, repeated
from torchcram.report.table import NOTICEABLE
from torchcram.report.template import render


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
