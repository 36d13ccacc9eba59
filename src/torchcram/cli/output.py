"""What --json names: a file, or standard output."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STANDARD_OUTPUT = Path("-")

Write = Callable[["DataclassInstance"], None]
"""Writes a result as JSON and says where."""


@contextmanager
def result_output(path: Path | None) -> Iterator[Write]:
    """Opens what --json names, for a `with` block that shows and writes a result.

    With `-` the JSON is all that standard output gets: whatever else the block prints, tables and
    what libraries have to say too, goes to standard error.

    Args:
        path: Path of the file, `-`, or None for none at all. A folder that is not there is made at
            once, so that a command fails before the work rather than after it.
    """
    from torchcram.experiments.io import json_text
    from torchcram.experiments.io.files import name_file_in_errors, write_atomically

    def to_file(result: DataclassInstance) -> None:
        if path is not None:
            write_atomically(path, json_text.dump(result))
            typer.echo(f"result: {path}")

    def to_output(result: DataclassInstance) -> None:
        with name_file_in_errors("standard output"):
            typer.echo(json_text.dump(result), file=out, nl=False)

    if path != STANDARD_OUTPUT:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        yield to_file
        return
    out = sys.stdout
    with redirect_stdout(sys.stderr):
        yield to_output
