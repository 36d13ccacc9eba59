"""torchcram bench."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line, usage
from torchcram.cli.options import (
    DATA,
    DataFolder,
    DeviceName,
    Download,
    ResultFile,
    Targets,
    check_targets,
    find_device,
    load,
)

BATCHES = (1, 16)


@app.command()
def bench(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_FILE", help="Folder of a finished run, or a compact file."),
    ],
    to: Targets = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="1 16", help="Batch size. Repeatable."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="that of torch", help="Number of threads. Repeatable."),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            show_default="all but the last",
            help="Engines, separated by commas: torch, compiled, onnxruntime, torchcram, "
            "torchcram-compiled; on a GPU torch, compiled, torchcram.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, show_default="25, fewer if slow", help="Number of timed rounds."),
    ] = None,
    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy/--no-accuracy", help="Test models whose accuracy is not in result.json."
        ),
    ] = True,
    json: ResultFile = None,
    data: DataFolder = DATA,
    device: DeviceName = "cpu",
    download: Download = False,
) -> None:
    """Measure models side by side: accuracy, file sizes, latency and throughput.

    The dense model and each target run in every engine, in turns, on real test data. The result is
    also written to the run folder, where `torchcram report` finds it.
    """
    with errors_in_a_line():
        import torch

        from torchcram.cli.output import result_output, show
        from torchcram.experiments.bench.candidates import open_source
        from torchcram.experiments.bench.engines import (
            CPU_ENGINES,
            DEFAULT,
            GPU_ENGINES,
            check_engines,
        )
        from torchcram.experiments.bench.record import FILES, write_bench
        from torchcram.experiments.bench.run import Plan, run_bench
        from torchcram.report.bench import size_table, speed_tables

        def say(line: str) -> None:
            typer.echo(line, err=True)

        where = find_device(device)
        gpu = where.type == "cuda"
        names = [name.strip() for name in engines.split(",")] if engines is not None else None
        names = names or list(GPU_ENGINES if gpu else DEFAULT)
        counts = tuple(threads or [torch.get_num_threads()])
        check_targets(to)
        with usage():
            check_engines(names, GPU_ENGINES if gpu else CPU_ENGINES)
            plan = Plan(tuple(names), tuple(batch or BATCHES), counts, rounds)
        opened = open_source(source, to or ())
        samples = load(opened.recipe, data, download=download)
        candidates = opened.candidates(samples, device=where, accuracy=accuracy, report=say)
        with result_output(json) as write:
            with tempfile.TemporaryDirectory() as folder:
                result = run_bench(
                    candidates,
                    opened.recipe,
                    samples,
                    plan=plan,
                    device=where,
                    folder=Path(folder),
                    report=say,
                )
            show(size_table(result))
            for table in speed_tables(result):
                show(table)
            if source.is_dir():
                write_bench(result, source / FILES[where.type])
                typer.echo(f"result: {source / FILES[where.type]}")
            write(result)
