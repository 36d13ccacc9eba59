"""Errors that a user can fix, printed in one line and without a traceback.

Exit status 2: the command line itself is wrong, whatever files, data and devices there are. Exit
status 1: anything else.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from torchcram.cli.torchrun import local_rank, rank

EXTRAS = {  # extra of torchcram for each package that may be missing
    "sklearn": "demo",
    "matplotlib": "report",
    "jinja2": "report",
    "torchvision": "vision",
    "transformers": "text",
    "tokenizers": "text",
    "peft": "lora",
    "PIL": "vision",
    "onnx": "export",
    "onnxscript": "export",
    "onnxruntime": "export",
}
CORE = {"numpy": "numpy", "rich": "rich", "safetensors": "safetensors", "yaml": "PyYAML"}
"""Packages that torchcram itself depends on, with their names on PyPI."""

USAGE = 2  # exit status of a wrong command line
INTERRUPTED = 130  # exit status that shells give to a command ended by Ctrl-C
PATIENCE = 5.0  # seconds for torchrun to end the other ranks after an error

# typer has a copy of click, or imports it, depending on its version
_ClickUsageError: Any = typer.BadParameter.__mro__[1]
_ClickError: Any = typer.BadParameter.__mro__[2]


class UsageError(ValueError):
    """A mistake in the command line."""


@contextmanager
def usage() -> Iterator[None]:
    """Turns ValueError in a `with` block into UsageError; for checks of arguments."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error


@contextmanager
def usage_in_a_line() -> Iterator[None]:
    """Prints errors of the command line parser in one line, with exit status 2."""
    try:
        yield
    except _ClickError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is printed already
            raise
        message = " ".join(error.format_message().split()).removesuffix(".")
        message = message.replace("Value error, ", "")  # newer versions of typer prepend it
        if isinstance(error, _ClickUsageError) and error.ctx is not None:
            message += f"; see {error.ctx.command_path} --help"
        _print_error(message)
        raise typer.Exit(error.exit_code) from None


@contextmanager
def errors_in_a_line(*, needs: str = "this", extra: str | None = None) -> Iterator[None]:
    """Prints errors in one line, with exit status 1, or 2 for `UsageError`; warnings too.

    Args:
        needs: Subject of the message about a missing package.
        extra: Extra that the message names for any such package; by default that in `EXTRAS`.
    """
    code = 1
    try:
        with _warnings_in_a_line():
            yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package in CORE:
            pip = f"pip install {CORE[package]}"
        elif package in EXTRAS:
            pip = f'pip install "torchcram[{extra or EXTRAS[package]}]"'
        else:
            raise
        message = f"{needs} needs {package}, which is missing: {pip}"
    except BrokenPipeError:  # the reader of standard output is gone; typer ends quietly
        raise
    except OSError as error:
        known = error.filename is not None and error.strerror
        message = f"{error.filename}: {error.strerror}" if known else str(error)
    except (ValueError, FloatingPointError) as error:
        message = str(error)
        code = USAGE if isinstance(error, UsageError) else 1
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # of torch, which may not be imported
            raise
        message = f"the memory of the GPU is full: {error}"
    else:
        return
    _print_error(" ".join(message.split()))
    raise typer.Exit(code)


def _print_error(message: str) -> None:
    """Prints an error; of several ranks with the same error, only the first on a machine does."""
    if local_rank():
        time.sleep(PATIENCE)  # if local rank 0 had an error, torchrun ends this rank meanwhile
        message = f"process {rank()}: {message}"
    typer.echo(f"error: {message}", err=True)


@contextmanager
def stoppable() -> Iterator[None]:
    """Lets Ctrl-C end a command that continues when it is run again."""
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
        # looked up now: a progress bar replaces it
        sys.stderr.write(f"warning: {' '.join(str(message).split())}\n")

    warnings.showwarning = show
    try:
        yield
    finally:
        warnings.showwarning = before
