"""Errors that a user can do something about, in a line and without a traceback."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

# which extra brings a package, for what is missing
EXTRAS = {
    "sklearn": "demo",
    "matplotlib": "report",
    "jinja2": "report",
    "torchvision": "vision",
    "PIL": "vision",
    "yaml": "vision",
    "safetensors": "vision",
}
INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended


@contextmanager
def errors_in_a_line(*, needs: str = "this", extra: str | None = None) -> Iterator[None]:
    """Turns errors into a line and exit status 1, and warnings into lines.

    Args:
        needs: who needs a package that is missing.
        extra: that brings every such package; by default the one that is about it.
    """
    try:
        with _warnings_in_a_line():
            yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        pip = f'pip install "torchcram[{extra or EXTRAS[package]}]"'
        message = f"{needs} needs {package}, which is missing: {pip}"
    except OSError as error:
        known = error.filename is not None and error.strerror
        message = f"{error.filename}: {error.strerror}" if known else str(error)
    except (ValueError, FloatingPointError) as error:
        message = str(error)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which may not be imported
            raise
        message = f"the memory of the GPU is full: {error}"
    else:
        return
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(1)


@contextmanager
def stoppable() -> Iterator[None]:
    """Lets Ctrl-C end a command that continues when it is given again."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; the same command continues where it was", err=True)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    before = warnings.showwarning

    def show(message: Warning | str, *_: object, **__: object) -> None:
        # as it is now: a progress bar puts itself between
        sys.stderr.write(f"warning: {' '.join(str(message).split())}\n")

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
