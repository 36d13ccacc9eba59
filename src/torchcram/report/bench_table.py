"""A benchmark as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from torchcram.experiments.bench.record import DENSE, fastest
from torchcram.report.bench_summary import ms, rate, size_cells, times
from torchcram.report.summary import percent

if TYPE_CHECKING:
    from torchcram.experiments.bench.record import Bench, Timing


def size_table(bench: Bench) -> Table:
    """Returns a line per model: how good it is, and how large its files are."""
    table = Table(
        title=Text(f"{bench.title}: test {bench.metric} in % on {bench.data}, and files in MB"),
        caption="smaller: than the plain safetensors file of the dense model",
    )
    table.add_column("model", no_wrap=True)
    columns = ("sparsity", bench.metric, "vs dense", "plain", "compact", "smaller", "ONNX")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for one in bench.subjects:
        zeros = percent(one.sparsity)
        dense = one.target == DENSE
        table.add_row(Text(one.target), zeros, *size_cells(bench, one), end_section=dense)
    return table


def speed_tables(bench: Bench) -> Sequence[Table]:
    """Returns a table per setting: a line per engine and model."""
    return [_speed_table(bench, place) for place in range(len(bench.settings))]


def _speed_table(bench: Bench, place: int) -> Table:
    setting, base = bench.settings[place], bench.baseline(place)
    shape = "x".join(map(str, setting.shape))
    caption = "ms: the median, and in brackets the quartiles; bold: the fastest engine"
    if base is not None:
        caption += f"\nspeed: against {base.engine}, the fastest engine on the dense model"
    table = Table(title=Text(f"{setting} ({shape}) on {bench.machine}"), caption=caption)
    table.add_column("model", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for column in ("ms", "", "speed", f"{bench.unit}/s"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for model in bench.subjects:
        found = [t for t in bench.timings if (t.target, t.setting) == (model.target, place)]
        for number, timing in enumerate(found):
            table.add_row(
                Text("" if number else model.target),
                timing.engine,
                *_cells(bench, timing),
                Text(timing.note),
                style="bold" if timing is fastest(found) else "",
                end_section=number == len(found) - 1,
            )
    return table


def _cells(bench: Bench, timing: Timing) -> list[str]:
    if timing.times is None:
        return ["", "", "", ""]
    speed = bench.ratio(timing)
    return [
        ms(timing.times.median),
        f"({ms(timing.times.low)} to {ms(timing.times.high)})",
        "" if speed is None else times(speed),
        rate(bench.per_second(timing) or 0),
    ]
