"""The application that commands are added to."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False)


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
