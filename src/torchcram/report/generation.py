"""Generation in benchmarks for people: tables for the terminal, tables and a chart for a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from torchcram.experiments.metrics import PERPLEXITY
from torchcram.report.charts import Chart, Point, cost_chart, make_point
from torchcram.report.summary import axis_label, on_axis, score_text
from torchcram.report.units import rate, size, times

if TYPE_CHECKING:
    from torchcram.experiments.bench.record import Bench, Generation, GenerationTiming


# Tables for the terminal


def generation_tables(bench: Bench) -> Sequence[Table]:
    """Returns a table per number of threads, with a row per model and engine that generates."""
    if bench.generation is None:
        return []
    return [_generation_table(bench, bench.generation, n) for n in bench.generation.threads]


def _generation_table(bench: Bench, generation: Generation, threads: int) -> Table:
    base = generation.baseline(threads)
    caption = "tokens/s: median, and the quartiles in brackets; bold: the fastest engine"
    caption += "\nprompt: tokens of the prompt per second"
    if base is not None:
        caption += f"\nspeed: relative to {base.engine}, the fastest engine on the dense model"
    if generation.scored_tokens is not None:
        caption += f"\n{PERPLEXITY}: {_scored_text(bench, generation)}"
    title = f"generation, {_setting(generation, threads)} on {bench.machine}"
    table = Table(title=Text(title), caption=caption)
    table.add_column("model", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for column in ("prompt", "tokens/s", "", "speed", PERPLEXITY):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for target in generation.targets:
        timings = [t for t in generation.timings if (t.target, t.threads) == (target, threads)]
        best = _most_tokens(timings)
        for row, timing in enumerate(timings):
            table.add_row(
                Text("" if row else target),
                timing.engine,
                *_generation_cells(generation, timing),
                Text(timing.note),
                style="bold" if timing is best else "",
                end_section=row == len(timings) - 1,
            )
    return table


def _generation_cells(generation: Generation, timing: GenerationTiming) -> list[str]:
    scored = "" if timing.perplexity is None else score_text(timing.perplexity, PERPLEXITY)
    if timing.prompt is None or timing.token is None:
        return ["", "", "", "", scored]
    speed = generation.ratio(timing)
    return [
        rate(_per_second(timing.prompt.median, generation.prompt_tokens)),
        rate(_per_second(timing.token.median)),
        f"({rate(_per_second(timing.token.high))} to {rate(_per_second(timing.token.low))})",
        "" if speed is None else times(speed),
        scored,
    ]


def _setting(generation: Generation, threads: int) -> str:
    """Returns the lengths of the texts and the number of threads in words."""
    plural = "" if threads == 1 else "s"
    lengths = f"prompt of {generation.prompt_tokens} tokens, {generation.new_tokens} after it"
    return f"{lengths}, {threads} thread{plural}"


def _scored_text(bench: Bench, generation: Generation) -> str:
    return (
        f"of what the engine computes, on the first {generation.scored_tokens:,} test tokens of "
        f"{bench.data}"
    )


def _per_second(milliseconds: float, tokens: int = 1) -> float:
    return 1000 * tokens / milliseconds


def _most_tokens(timings: Sequence[GenerationTiming]) -> GenerationTiming | None:
    """Returns the timing with the most tokens per second; None where no engine could run."""
    ran = [(timing.token.median, timing) for timing in timings if timing.token is not None]
    return min(ran, key=lambda pair: pair[0])[1] if ran else None


def _file_bytes(bench: Bench, generation: Generation, target: str) -> int:
    """Returns the size of a compact file, or that of a GGUF file."""
    sizes = {file.name: file.bytes for file in generation.files}
    sizes |= {model.target: model.compact_bytes for model in bench.subjects}
    return sizes[target]


# A section of a page


@dataclass(frozen=True)
class GenerationCell:
    """An engine that generates, as text.

    Attributes:
        median: Median of the tokens per second.
        speed: Ratio to the baseline.
        spread: Quartiles of the tokens per second.
        best: Whether no other engine is faster with the same model.
        prompt: Tokens of a prompt per second.
        scored: Perplexity of what an engine generates by.
    """

    median: str = ""
    speed: str = ""
    spread: str = ""
    best: bool = False
    prompt: str = ""
    scored: str = ""


@dataclass(frozen=True)
class Generated:
    """The table of generation with one number of threads.

    Attributes:
        title: Lengths of the texts and number of threads.
        baseline: Engine that the others are compared with.
        scored: Text that the perplexities are of; empty where there are none.
        rows: Targets with the sizes of their files, each with a cell for every engine.
        notes: Reasons why engines could not run.
    """

    title: str
    baseline: str
    scored: str
    rows: Sequence[tuple[str, str, Sequence[GenerationCell]]]
    notes: Sequence[str]


def generated_tables(bench: Bench) -> list[Generated]:
    """Returns a table of the page per number of threads; none where nothing was generated."""
    if bench.generation is None:
        return []
    return [_generated(bench, bench.generation, n) for n in bench.generation.threads]


def _generated(bench: Bench, generation: Generation, threads: int) -> Generated:
    base = generation.baseline(threads)
    rows, notes = [], []
    for target in generation.targets:
        timings = [generation.timing(target, engine, threads) for engine in generation.engines]
        best = _most_tokens([timing for timing in timings if timing is not None])
        cells = [_generation_cell(generation, timing, timing is best) for timing in timings]
        rows.append((target, size(_file_bytes(bench, generation, target)), cells))
        notes += [
            f"{timing.target} with {timing.engine}: {timing.note}"
            for timing in timings
            if timing is not None and timing.token is None
        ]
    return Generated(
        title=_setting(generation, threads),
        baseline="" if base is None else base.engine,
        scored="" if generation.scored_tokens is None else _scored_text(bench, generation),
        rows=rows,
        notes=notes,
    )


def _generation_cell(
    generation: Generation, timing: GenerationTiming | None, best: bool
) -> GenerationCell:
    if timing is None or timing.token is None:
        return GenerationCell("-" if timing is not None else "")
    prompt, median, spread, speed, scored = _generation_cells(generation, timing)
    return GenerationCell(median, speed, spread.strip("()"), best, prompt, scored)


def generation_chart(bench: Bench) -> Chart | None:
    """Returns perplexity against tokens per second, a view per number of threads.

    Returns:
        The chart, or None where no perplexity is known.
    """
    generation = bench.generation
    if generation is None:
        return None
    series: dict[str, list[Point]] = {name: [] for name in generation.engines}
    for timing in generation.timings:
        if timing.token is None or timing.perplexity is None:
            continue
        prompt, median, spread, speed, scored = _generation_cells(generation, timing)
        text = {
            "model": timing.target,
            PERPLEXITY: scored,
            "tokens/s": median,
            "quartiles": spread.strip("()"),
            "prompt, tokens/s": prompt,
            "file": f"{size(_file_bytes(bench, generation, timing.target))} MB",
            **({"speed": speed} if speed else {}),
            **({"note": timing.note} if timing.note else {}),
        }
        value = on_axis(timing.perplexity, PERPLEXITY)
        y = [value if count == timing.threads else None for count in generation.threads]
        series[timing.engine].append(make_point(_per_second(timing.token.median), y, text))
    views = [f"{count} thread{'' if count == 1 else 's'}" for count in generation.threads]
    return cost_chart(
        series,
        views,
        "generated tokens per second, the median over the rounds",
        axis_label(PERPLEXITY),
        falls=True,
        benefit=True,
    )
