"""torchcram models export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import UsageError, errors_in_a_line

models = typer.Typer(no_args_is_help=True, help="Language models, to take to other machines.")
app.add_typer(models, name="models")


@models.callback()
def _models() -> None:
    """Language models, to take to other machines."""


@models.command()
def export(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="minilm-l6.")],
    out: Annotated[Path, typer.Argument(metavar="DIR", file_okay=False, help="Folder for it.")],
    dtype: Annotated[
        str, typer.Option(help="float32; float16 and bfloat16 take half the space, rounded.")
    ] = "float32",
) -> None:
    """Write a model that a package carries as a folder that Transformers reads."""
    with errors_in_a_line():
        from torchcram.experiments.models.text import MINILM, export_minilm

        if name != MINILM:
            raise UsageError(f"model {name!r}: allowed is {MINILM}, which a package carries")
        folder = export_minilm(out, dtype=dtype)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        typer.echo(f"model: {folder}, {size:.0f} MB; use it by --set model.name={folder.resolve()}")
