"""torchcram report, torchcram results and torchcram costs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import UsageError, errors_in_a_line, usage
from torchcram.cli.options import ResultFile

RESULTS = Path("results")
PAGES = (Path("README.md"), Path("docs/results.md"))


@app.command()
def report(
    sources: Annotated[
        list[Path],
        typer.Argument(metavar="RUN", help="Run folders, result files, folders of results."),
    ],
    out: Annotated[Path, typer.Option(dir_okay=False, help="HTML file to write.")] = Path(
        "report.html"
    ),
) -> None:
    """Write one HTML page: accuracy against sparsity, tables, training curves, settings.

    Speed and size are included for runs that `torchcram bench` has measured.
    """
    with errors_in_a_line():
        from torchcram.experiments.io.files import write_atomically
        from torchcram.report.runs import runs_page
        from torchcram.report.sources import read_benches, read_sources

        results, logs = read_sources(sources)
        page = runs_page(results, logs=logs, benches=read_benches(sources))
        write_atomically(out, page.encode())
        typer.echo(f"report: {out}")


@app.command()
def results(
    pages: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="FILE", show_default="README.md docs/results.md", help="Markdown files."
        ),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--results", file_okay=False, help="Folder of results.")
    ] = RESULTS,
    write: Annotated[bool, typer.Option("--write", help="Rewrite the marked tables.")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Exit with status 1 if a marked table is out of date.")
    ] = False,
) -> None:
    """Show all results, or write or check the tables of results in Markdown files."""
    with errors_in_a_line():
        from torchcram.report.markdown_tables import stale, update_files

        if write and check:
            raise UsageError("--write and --check exclude each other")
        if pages and not (write or check):
            raise UsageError("FILE needs --write or --check")
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder")
        if not (write or check):
            _show_all(folder)
            return
        files = pages or [page for page in PAGES if page.exists()]
        if not files:
            raise ValueError(f"none of {', '.join(map(str, PAGES))} exists here; name the files")
        if write:
            changed = update_files(files, folder)
            typer.echo("\n".join(f"written: {path}" for path in changed) or "all up to date")
        elif outdated := stale(files, folder):
            typer.echo("\n".join(f"stale: {section}" for section in outdated), err=True)
            line = ["torchcram", "results", "--write", *map(str, files)]
            line += [] if folder == RESULTS else ["--results", str(folder)]
            typer.echo(f"to update: {shlex.join(line)}", err=True)
            raise typer.Exit(1)
        else:
            typer.echo("all up to date")


def _show_all(folder: Path) -> None:
    from torchcram.cli.output import show
    from torchcram.experiments.evaluation.results import read_results
    from torchcram.report.results_table import result_table

    shown = read_results(folder)
    if not shown:
        raise ValueError(f"{folder} has no results")
    for result in shown:
        show(result_table(result))


@app.command()
def costs(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH",
            show_default="results",
            help="Folders of results, result files, run folders.",
        ),
    ] = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP",
            show_default="those that models were trained or fine-tuned for",
            help="Target such as global:0.9, in the order in which they are needed. Repeatable.",
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables in Markdown.")
    ] = False,
    json: ResultFile = None,
) -> None:
    """Compare what several targets cost: one training for all, or one for each.

    For every method, the table shows the passes over the training set that the first 1, 2, ...
    targets need, fine-tuning included, and the score at each target. A result does not know the
    passes before a training that started --from another run; they are not counted.
    """
    with errors_in_a_line():
        from torchcram.cli.output import result_output, show
        from torchcram.report.costs import compare_costs, cost_table
        from torchcram.report.markdown_tables import costs_markdown
        from torchcram.report.sources import read_sources

        targets = _read_targets(at or ())
        compared = compare_costs(read_sources(paths or [RESULTS])[0], targets)
        shown = [comparison for comparison in compared.comparisons if comparison.methods]
        if not shown:
            raise ValueError(f"no result has a score at {', '.join(targets) or 'any target'}")
        with result_output(json) as write:
            for comparison in shown:
                if markdown:
                    typer.echo(f"{comparison.name}\n\n{costs_markdown(comparison)}")
                else:
                    show(cost_table(comparison))
            write(compared)


def _read_targets(texts: Sequence[str]) -> list[str]:
    """Returns operators in their canonical form; raises UsageError for what cannot be one."""
    from torchcram.experiments.recipe.overrides import DENSE, read_at

    with usage():
        targets = [read_at(text) for text in texts]
    if DENSE in targets:
        raise UsageError("--at dense: every method has a dense model; allowed are operators")
    if len(set(targets)) < len(targets):
        raise UsageError(f"--at: every operator is allowed once, got {', '.join(targets)}")
    return targets
