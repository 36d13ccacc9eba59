"""torchcram demo."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line, stoppable


@app.command()
def demo(
    out: Annotated[
        Path,
        typer.Option(
            file_okay=False,
            writable=True,
            help="Folder for the runs, the picture, the page and the table.",
        ),
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, batches and operators.")] = 0,
    epochs: Annotated[
        int, typer.Option(min=1, help="Epochs of CrAM+; SGD trains for twice as many.")
    ] = 80,
) -> None:
    """Train a small network by SGD and by CrAM+, compress both in one shot, and compare them.

    Also shows the file sizes and the speed of the compressed models. It takes about a minute,
    downloads nothing and needs no GPU. A training that was stopped continues with the same command.
    """
    with errors_in_a_line(needs="the demo", extra="demo"), stoppable():
        from torchcram.cli.output import show
        from torchcram.cli.progress import watching
        from torchcram.experiments.demo import run_demo
        from torchcram.report.bench import overview_table
        from torchcram.report.demo import write_demo
        from torchcram.report.results_table import comparison_table
        from torchcram.report.summary import counted, duration

        out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
        with watching() as watch:
            done = run_demo(out, seed=seed, epochs=epochs, progress=watch.training)
        show(comparison_table(done.results))
        show(overview_table(done.bench))
        for result in done.results:
            trained = counted(result.recipe["train"]["epochs"], "epoch")
            typer.echo(f"{result.title}: {trained}, {duration(result.seeds[0].seconds)}")
        for run in done.runs:
            typer.echo(f"run: {run}")
        for name, path in write_demo(done.runs, out).items():
            typer.echo(f"{name}: {path}")
