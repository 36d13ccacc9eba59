"""Errors that a user can do something about, in a line and without a traceback."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from torchcram.cli.torchrun import local_rank, rank

# which extra brings a package, for what is missing
EXTRAS = {
    "sklearn": "demo",
    "matplotlib": "report",
    "jinja2": "report",
    "torchvision": "vision",
    "transformers": "text",
    "tokenizers": "text",
    "PIL": "vision",
    "yaml": "vision",
    "safetensors": "vision",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
}
INTERRUPTED = 130  # what a shell says of a command that Ctrl-C ended
PATIENCE = 5.0  # seconds, for torchrun to end a process whose error another one has told


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
    _tell(" ".join(message.split()))
    raise typer.Exit(1)


def _tell(message: str) -> None:
    """Says a message; of several processes with the same error only one on a machine does."""
    if local_rank():
        time.sleep(PATIENCE)  # if the first one had an error, torchrun ends this one meanwhile
        message = f"process {rank()}: {message}"
    typer.echo(f"error: {message}", err=True)


@contextmanager
def stoppable() -> Iterator[None]:
    """Lets Ctrl-C end a command that continues when it is given again."""
    try:
        yield
    except KeyboardInterrupt:
        if rank() == 0:
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
