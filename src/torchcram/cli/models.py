"""torchcram models export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import UsageError, errors_in_a_line

models = typer.Typer(no_args_is_help=True, help="Language models to copy to other machines.")
app.add_typer(models, name="models")


@models.callback()
def _models() -> None:
    """Language models to copy to other machines."""


@models.command()
def export(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model: minilm-l6.")],
    out: Annotated[
        Path, typer.Argument(metavar="DIR", file_okay=False, help="Folder for the model.")
    ],
    dtype: Annotated[
        str,
        typer.Option(help="Type of the weights: float32, or float16 or bfloat16 at half the size."),
    ] = "float32",
) -> None:
    """Write a model that is bundled with a package as a folder that Transformers reads."""
    with errors_in_a_line():
        from torchcram.experiments.models.text import MINILM, export_minilm

        if name != MINILM:
            raise UsageError(
                f"model {name!r}: allowed is {MINILM}, which is bundled with a package"
            )
        folder = export_minilm(out, dtype=dtype)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
        typer.echo(
            f"model: {folder}, {size:.0f} MB; use it with --set model.name={folder.resolve()}"
        )
