"""Benchmarks as a section of a page: what its tables and charts show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcram.experiments.bench.record import FILES, read_bench
from torchcram.report.bench_charts import latency_chart, size_chart
from torchcram.report.bench_summary import ms, size_cells, times

if TYPE_CHECKING:
    from torchcram.experiments.bench.record import Bench, Timing


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
        title: batch, threads and shape.
        baseline: the engine that the others are compared with.
        rows: the target and a cell for every engine.
        notes: why engines could not run.
    """

    title: str
    baseline: str
    rows: Sequence[tuple[str, Sequence[Cell]]]
    notes: Sequence[str]


@dataclass(frozen=True)
class Section:
    """A benchmark as the page shows it.

    Attributes:
        bench: as it was read.
        sizes: a row per model: target, accuracy, change, plain file, compact file, ratio, ONNX.
        speeds: a table per setting.
        charts: places of the charts on the page, and what they show.
    """

    bench: Bench
    sizes: Sequence[Sequence[str]]
    speeds: Sequence[Speeds]
    charts: Sequence[tuple[int, str]]


def read_benches(paths: Iterable[Path]) -> list[Bench]:
    """Reads what `torchcram bench` left in run folders; others have none.

    Raises:
        ValueError: naming the file, if it is not as it should be.
    """
    found = [path / name for path in paths for name in FILES.values()]
    return [read_bench(path) for path in found if path.is_file()]


def sections(benches: Iterable[Bench], first: int) -> tuple[list[Section], list[dict[str, Any]]]:
    """Returns sections, and their charts.

    Args:
        benches: as they were read.
        first: how many charts the page has already.
    """
    made: list[Section] = []
    charts: list[dict[str, Any]] = []
    for bench in benches:
        places = []
        for chart, label in (
            (latency_chart(bench), f"{bench.metric} against latency, a series for every engine"),
            (size_chart(bench), f"{bench.metric} against file size, a series for every format"),
        ):
            if chart is not None:
                places.append((first + len(charts), label))
                charts.append(chart)
        sizes = [[one.target, *size_cells(bench, one)] for one in bench.subjects]
        speeds = [_speeds(bench, place) for place in range(len(bench.settings))]
        made.append(Section(bench, sizes, speeds, places))
    return made, charts


def _speeds(bench: Bench, place: int) -> Speeds:
    setting, base = bench.settings[place], bench.baseline(place)
    rows, notes = [], []
    for model in bench.subjects:
        found = [bench.timing(model.target, engine, place) for engine in bench.engines]
        ran = [one.times.median for one in found if one is not None and one.times is not None]
        rows.append((model.target, [_cell(bench, one, min(ran, default=0)) for one in found]))
        notes += [
            f"{one.target} with {one.engine}: {one.note}"
            for one in found
            if one is not None and one.times is None
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
    speed, found = bench.ratio(timing), timing.times
    return Cell(
        median=ms(found.median),
        speed="" if speed is None else times(speed),
        spread=f"{ms(found.low)} to {ms(found.high)}",
        best=found.median == least,
    )
