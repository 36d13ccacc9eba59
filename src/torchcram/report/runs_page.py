"""Several runs as one HTML page that needs nothing else: charts to point at, tables, settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchcram.experiments.results import Result
from torchcram.report.runs import group_runs
from torchcram.report.runs_charts import accuracy_chart, training_chart
from torchcram.report.summary import percent, points, repeated
from torchcram.report.table import NOTICEABLE


def runs_page(
    results: Sequence[Result],
    *,
    title: str = "One training, every size",
    logs: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> str:
    """Renders the page.

    Args:
        results: at least one; those of the same task and model share a chart and a table.
        title: heads the page.
        logs: records of `log.jsonl` by the title of the run, with epoch and any of loss,
            compressed_loss, accuracy, lr. A title that is that of a result takes its colour.

    Raises:
        ValueError: if there are no results, or a record has no epoch.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    if not results:
        raise ValueError("no results: a page needs at least one")
    groups = group_runs(results)
    charts = [accuracy_chart(group.runs) for group in groups]
    if logs:
        runs = [run for group in groups for run in group.runs]
        styles = {name: run.style for run in runs for name in (run.result.title, run.label)}
        charts.append(training_chart(logs, styles))
    environment = Environment(
        loader=PackageLoader("torchcram.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(percent=percent, points=points)
    return environment.get_template("runs.html.j2").render(
        title=title,
        groups=groups,
        charts=charts,
        logs=bool(logs),
        noticeable=NOTICEABLE,
        repeated=[over for over in dict.fromkeys(map(repeated, results)) if over],
    )
