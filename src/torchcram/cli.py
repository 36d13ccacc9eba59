"""The command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from torchcram.experiments.demo import Progress

app = typer.Typer(no_args_is_help=True, add_completion=False)

EXTRAS = ("sklearn", "matplotlib", "jinja2")  # what torchcram[demo] brings


def _version(wanted: bool) -> None:
    if wanted:
        from torchcram import __version__

        typer.echo(f"torchcram {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train a model once; compress it to any size in one shot."""


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

    Takes about a minute, downloads nothing, needs no GPU. Writes a picture, a page and a JSON file.
    """
    with _errors_in_a_line():
        from rich.console import Console

        from torchcram.experiments.demo import run_demo
        from torchcram.experiments.demo_result import DemoSettings
        from torchcram.report.files import write_demo
        from torchcram.report.table import demo_table

        out.mkdir(parents=True, exist_ok=True)  # fails now rather than after the training
        default = DemoSettings()
        with _progress(Console(stderr=True)) as progress:
            result = run_demo(
                replace(default, seed=seed, epochs=epochs or default.epochs), progress
            )
        Console().print(demo_table(result))
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


@contextmanager
def _errors_in_a_line() -> Iterator[None]:
    """Turns a missing extra and a file that cannot be written into one line and exit status 1."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        message = f'the demo needs {package}, which is missing: pip install "torchcram[demo]"'
    except OSError as error:
        message = str(error)
    else:
        return
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(1)
