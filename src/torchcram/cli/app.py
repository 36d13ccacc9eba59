"""The application that the commands are added to."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from torchcram.cli.errors import UsageError, errors_in_a_line, usage_in_a_line
from torchcram.cli.torchrun import processes

DISTRIBUTED = ("train",)  # commands that may run under torchrun


class Commands(TyperGroup):
    """The commands; usage errors are printed like all other errors."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401
        """Parses the options before the name of a command."""
        with usage_in_a_line():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        """Parses the rest and runs the command."""
        with usage_in_a_line():
            return super().invoke(ctx)


app = typer.Typer(name="torchcram", cls=Commands, no_args_is_help=True, add_completion=False)


def _version(show: bool) -> None:
    if show:
        from torchcram import __version__

        typer.echo(f"torchcram {__version__}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback has done it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train a model once; compress it to any size in one shot."""
    if processes() > 1 and context.invoked_subcommand not in DISTRIBUTED:
        with errors_in_a_line():
            raise UsageError(
                f"{context.invoked_subcommand} runs in one process, and torchrun has "
                f"started {processes()}: start it without torchrun"
            )
