"""Benchmarks for people: tables for the terminal, and a section with charts for a page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from torchcram.experiments.bench.record import DENSE, fastest
from torchcram.experiments.metrics import PERPLEXITY, change_from, less_is_better
from torchcram.report.charts import Chart, Point, cost_chart, make_point
from torchcram.report.generation import Generated, generated_tables, generation_chart
from torchcram.report.summary import (
    axis_label,
    change_text,
    in_percent,
    on_axis,
    percent,
    percent_sign,
    score_text,
)
from torchcram.report.units import MEGA, ms, rate, size, times

if TYPE_CHECKING:
    from torchcram.experiments.bench.record import Bench, ModelRecord, Timing

SERIES = {"compact file": "compact_bytes", "ONNX file": "onnx_bytes", "plain file": "plain_bytes"}


def size_cells(bench: Bench, model: ModelRecord) -> list[str]:
    """Returns the accuracy of a model, its change, and the plain, compact and ONNX files.

    The ratio after the compact file is how much smaller it is than the plain file of the dense
    model.
    """
    dense, change = bench.subjects[0], ""
    if model is not dense and model.accuracy is not None and dense.accuracy is not None:
        change = change_text(
            change_from(dense.accuracy, model.accuracy, bench.metric), bench.metric
        )
    return [
        "" if model.accuracy is None else score_text(model.accuracy, bench.metric),
        change,
        size(model.plain_bytes),
        size(model.compact_bytes),
        times(dense.plain_bytes / model.compact_bytes),
        "" if model.onnx_bytes is None else size(model.onnx_bytes),
    ]


# Tables for the terminal


def size_table(bench: Bench) -> Table:
    """Returns a row per model: its accuracy, and the sizes of its files."""
    table = Table(
        title=Text(
            f"{bench.title}: test {in_percent(bench.metric)} on {bench.data}, and files in MB"
        ),
        caption="smaller: compact file against the plain safetensors file of the dense model",
    )
    table.add_column("model", no_wrap=True)
    columns = ("sparsity", bench.metric, "vs dense", "plain", "compact", "smaller", "ONNX")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for model in bench.subjects:
        zeros = percent(model.sparsity)
        dense = model.target == DENSE
        table.add_row(Text(model.target), zeros, *size_cells(bench, model), end_section=dense)
    return table


def speed_tables(bench: Bench) -> Sequence[Table]:
    """Returns a table per setting, with a row per model and engine."""
    return [_speed_table(bench, setting) for setting in range(len(bench.settings))]


def overview_table(bench: Bench, setting: int = 0) -> Table:
    """Returns a row per model: its compact file, and the time of every engine in one setting."""
    base = bench.baseline(setting)
    table = Table(
        title=Text(f"{bench.title}: compact files in MB, and times in ms"),
        caption=f"{bench.settings[setting]}\nsmaller: against the plain file of the dense model"
        + ("" if base is None else f"\nspeed: fastest engine against {base.engine} on dense"),
    )
    table.add_column("model", no_wrap=True)
    for column in ("file", "smaller", *bench.engines, "speed"):
        table.add_column(column, justify="right", no_wrap=True)
    dense = bench.subjects[0]
    for model in bench.subjects:
        timings = [bench.timing(model.target, engine, setting) for engine in bench.engines]
        best = fastest(timing for timing in timings if timing is not None)
        speed = None if best is None else bench.ratio(best)
        table.add_row(
            Text(model.target),
            size(model.compact_bytes),
            times(dense.plain_bytes / model.compact_bytes),
            *("" if t is None or t.times is None else ms(t.times.median) for t in timings),
            "" if speed is None else times(speed),
            end_section=model is dense,
        )
    return table


def _speed_table(bench: Bench, index: int) -> Table:
    setting, base = bench.settings[index], bench.baseline(index)
    shape = "x".join(map(str, setting.shape))
    caption = "ms: median, and the quartiles in brackets; bold: the fastest engine"
    if base is not None:
        caption += f"\nspeed: relative to {base.engine}, the fastest engine on the dense model"
    table = Table(title=Text(f"{setting} ({shape}) on {bench.machine}"), caption=caption)
    table.add_column("model", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for column in ("ms", "", "speed", f"{bench.unit}/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for model in bench.subjects:
        timings = [t for t in bench.timings if (t.target, t.setting) == (model.target, index)]
        for row, timing in enumerate(timings):
            table.add_row(
                Text("" if row else model.target),
                timing.engine,
                *_speed_cells(bench, timing),
                Text(timing.note),
                style="bold" if timing is fastest(timings) else "",
                end_section=row == len(timings) - 1,
            )
    return table


def _speed_cells(bench: Bench, timing: Timing) -> list[str]:
    if timing.times is None:
        return ["", "", "", ""]
    speed = bench.ratio(timing)
    return [
        ms(timing.times.median),
        f"({ms(timing.times.low)} to {ms(timing.times.high)})",
        "" if speed is None else times(speed),
        rate(bench.per_second(timing) or 0),
    ]


# A section of a page


@dataclass(frozen=True)
class Cell:
    """The time of an engine as text: the median, the ratio and the quartiles."""

    median: str = ""
    speed: str = ""
    spread: str = ""
    best: bool = False


@dataclass(frozen=True)
class Speeds:
    """The table of one setting.

    Attributes:
        title: Batch size, threads and shape of the inputs.
        baseline: Engine that the others are compared with.
        rows: Targets, each with a cell for every engine.
        notes: Reasons why engines could not run.
    """

    title: str
    baseline: str
    rows: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[str]


@dataclass(frozen=True)
class Section:
    """A benchmark as the page shows it.

    Attributes:
        bench: Benchmark as it was read.
        sizes: Rows of the table of models: target, accuracy, change, plain file, compact file,
            ratio, ONNX file.
        speeds: Tables of the settings.
        charts: Indices of the charts on the page, each with a description.
        generated: Tables of generation.
        generation_charts: Indices of the charts of generation, each with a description.
    """

    bench: Bench
    sizes: Sequence[Sequence[str]]
    speeds: Sequence[Speeds]
    charts: Sequence[tuple[int, str]]
    generated: Sequence[Generated]
    generation_charts: Sequence[tuple[int, str]]


def sections(benches: Iterable[Bench], first: int) -> tuple[list[Section], list[Chart]]:
    """Returns the sections of benchmarks, and their charts.

    Args:
        benches: Benchmarks as they were read.
        first: Number of charts that the page has already.
    """
    shown: list[Section] = []
    charts: list[Chart] = []
    for bench in benches:
        described = []
        for chart, label in (
            (latency_chart(bench), f"{bench.metric} against latency, a series for every engine"),
            (size_chart(bench), f"{bench.metric} against file size, a series for every format"),
        ):
            if chart is not None:
                described.append((first + len(charts), label))
                charts.append(chart)
        sizes = [[model.target, *size_cells(bench, model)] for model in bench.subjects]
        speeds = [_speeds(bench, setting) for setting in range(len(bench.settings))]
        chart, tokens = generation_chart(bench), []
        if chart is not None:
            label = f"{PERPLEXITY} against tokens per second, a series for every engine"
            tokens.append((first + len(charts), label))
            charts.append(chart)
        generated = generated_tables(bench)
        shown.append(Section(bench, sizes, speeds, described, generated, tokens))
    return shown, charts


def _speeds(bench: Bench, index: int) -> Speeds:
    setting, base = bench.settings[index], bench.baseline(index)
    rows, notes = [], []
    for model in bench.subjects:
        timings = [bench.timing(model.target, engine, index) for engine in bench.engines]
        medians = [t.times.median for t in timings if t is not None and t.times is not None]
        rows.append((model.target, [_cell(bench, t, min(medians, default=0)) for t in timings]))
        notes += [
            f"{timing.target} with {timing.engine}: {timing.note}"
            for timing in timings
            if timing is not None and timing.times is None
        ]
    return Speeds(
        title=f"{setting}, {'x'.join(map(str, setting.shape))}",
        baseline="" if base is None else base.engine,
        rows=rows,
        notes=notes,
    )


def _cell(bench: Bench, timing: Timing | None, least: float) -> Cell:
    if timing is None or timing.times is None:
        return Cell("-" if timing is not None else "")
    speed = bench.ratio(timing)
    return Cell(
        median=ms(timing.times.median),
        speed="" if speed is None else times(speed),
        spread=f"{ms(timing.times.low)} to {ms(timing.times.high)}",
        best=timing.times.median == least,
    )


def latency_chart(bench: Bench) -> Chart | None:
    """Returns accuracy against latency, a view per setting; None where no accuracy is known."""
    views = [f"batch {setting.batch}" for setting in bench.settings]
    if len({setting.threads for setting in bench.settings}) > 1:
        views = [str(setting) for setting in bench.settings]
    series: dict[str, list[Point]] = {name: [] for name in bench.engines}
    for timing in bench.timings:
        point = _latency_point(bench, timing)
        if point is not None:
            series[timing.engine].append(point)
    label = "latency in ms, the median over the rounds"
    return cost_chart(
        series, views, label, axis_label(bench.metric), falls=less_is_better(bench.metric)
    )


def size_chart(bench: Bench) -> Chart | None:
    """Returns accuracy against the size of files; None where no accuracy is known."""
    series = {
        name: [
            _size_point(bench, model, name, model.accuracy, getattr(model, key))
            for model in bench.subjects
            if model.accuracy is not None and getattr(model, key) is not None
        ]
        for name, key in SERIES.items()
    }
    return cost_chart(
        series,
        ["file"],
        "size of the file in MB",
        axis_label(bench.metric),
        falls=less_is_better(bench.metric),
    )


def _latency_point(bench: Bench, timing: Timing) -> Point | None:
    model = next(model for model in bench.subjects if model.target == timing.target)
    speed = bench.ratio(timing)
    if timing.times is None or model.accuracy is None:
        return None
    low, high = ms(timing.times.low), ms(timing.times.high)
    text = {
        "model": model.target,
        bench.metric: score_text(model.accuracy, bench.metric) + percent_sign(bench.metric),
        "latency": f"{ms(timing.times.median)} ms",
        "quartiles": f"{low} to {high} ms",
        f"{bench.unit}/s": rate(bench.per_second(timing) or 0),
        **({} if speed is None else {"speed": times(speed)}),
        **({"note": timing.note} if timing.note else {}),
    }
    settings = range(len(bench.settings))
    value = on_axis(model.accuracy, bench.metric)
    y = [value if setting == timing.setting else None for setting in settings]
    return make_point(timing.times.median, y, text)


def _size_point(
    bench: Bench, model: ModelRecord, series: str, accuracy: float, count: int
) -> Point:
    text = {
        "model": model.target,
        bench.metric: score_text(accuracy, bench.metric) + percent_sign(bench.metric),
        series: f"{size(count)} MB",
        "smaller": times(bench.subjects[0].plain_bytes / count),
    }
    return make_point(count / MEGA, [on_axis(accuracy, bench.metric)], text)
