"""torchcram demo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line

if TYPE_CHECKING:
    from rich.console import Console

    from torchcram.experiments.demo import Progress


@app.command()
def demo(
    out: Annotated[
        Path, typer.Option(file_okay=False, writable=True, help="Where the files go.")
    ] = Path("demo"),
    seed: Annotated[int, typer.Option(min=0, help="Of weights, batches and draws.")] = 0,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Of CrAM+; SGD trains for twice as many.")
    ] = None,
) -> None:
    """Train a small net by SGD and by CrAM+, prune and quantize both, compare.

    Also shows how large the files are and how fast the nets run. Takes about a minute, downloads
    nothing, needs no GPU. Writes a picture, a page and a JSON file.
    """
    with errors_in_a_line(needs="the demo", extra="demo"):
        from rich.console import Console

        from torchcram.experiments.demo import run_demo
        from torchcram.experiments.demo_result import DemoSettings
        from torchcram.report.files import write_demo
        from torchcram.report.table import demo_table, deployed_table

        out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
        default = DemoSettings()
        with _progress(Console(stderr=True)) as progress:
            result = run_demo(
                replace(default, seed=seed, epochs=epochs or default.epochs), progress
            )
        Console().print(demo_table(result))
        Console().print(deployed_table(result))
        for trained in result.trained:
            typer.echo(f"{trained.method}: {trained.epochs} epochs, {trained.seconds:.0f} s")
        for what, path in write_demo(result, out).items():
            typer.echo(f"{what}: {path}")


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    """A bar per training where someone is watching, else a line per training."""
    if not console.is_terminal:
        yield _line_per_training
        return
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    tasks: dict[str, TaskID] = {}
    with Bars(console=console) as bars:

        def show(method: str, done: int, epochs: int) -> None:
            if method not in tasks:
                tasks[method] = bars.add_task(f"training by {method}", total=epochs)
            bars.update(tasks[method], completed=done)

        yield show


def _line_per_training(method: str, done: int, epochs: int) -> None:
    if done == 0:
        typer.echo(f"training by {method}, epochs: {epochs}", err=True)
