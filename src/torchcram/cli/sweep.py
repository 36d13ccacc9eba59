"""torchcram sweep."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line, stoppable, usage
from torchcram.cli.options import (
    DATA,
    RUNS,
    Compile,
    DataFolder,
    DeviceName,
    Download,
    Eager,
    Epochs,
    EvalInterval,
    Sets,
    check_epochs,
    check_sets,
    find_device,
    load,
    step_maker,
)

FILE = "sweep.json"


@app.command()
def sweep(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="Name or file of the recipe.")],
    grid: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=V,V", help="Values to try, such as cram.rho=0.05,0.1. Repeatable."
        ),
    ],
    score: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OP", help="Operator to score on, instead of all targets. Repeatable."
        ),
    ] = None,
    epochs: Epochs = None,
    sets: Sets = None,
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False, show_default="runs/RECIPE/sweep", help="Folder for all runs."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of every training.")] = 0,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    eager: Eager = False,
    compiled: Compile = False,
    eval_interval: EvalInterval = 1,
    download: Download = False,
) -> None:
    """Try settings on nine tenths of the training set; show which are best when compressed.

    The score is the mean accuracy on the held-out tenth after compression and batch-norm tuning. No
    test sample is used.
    """
    with errors_in_a_line(), stoppable():
        import json

        from torchcram import parse_operator
        from torchcram.cli.output import show, sweep_table
        from torchcram.cli.progress import watching
        from torchcram.experiments.io.files import write_atomically
        from torchcram.experiments.recipe import load_recipe
        from torchcram.experiments.recipe.overrides import with_epochs
        from torchcram.experiments.sweep import read_grid
        from torchcram.experiments.sweep import sweep as try_out

        changes = tuple(sets or ())
        check_epochs(epochs, [*changes, *grid])
        check_sets(changes)
        with usage():
            grid_points = read_grid(grid)
            scored = [str(parse_operator(text)) for text in score or ()]
        recipes = {
            point: with_epochs(load_recipe(recipe, [*changes, *point]), epochs)
            for point in grid_points
        }
        first = next(iter(recipes.values()))
        folder = out or RUNS / first.name / "sweep"
        where = find_device(device)
        images = load(first, data, download=download)
        with watching() as watch:
            points = try_out(
                recipes,
                folder,
                data=images,
                device=where,
                seed=seed,
                score=score or (),
                make_step=step_maker(eager, compiled),
                eval_interval=eval_interval,
                progress=watch.training,
            )
        wide, narrow = (
            sweep_table(points, score or (), targets=more, metric=first.metric)
            for more in (True, False)
        )
        show(wide, narrow)
        best = points[0]
        if best.score is None:
            raise ValueError(f"every training failed; the first: {best.failed}")
        line = ["torchcram", "train", recipe]
        for text in (*changes, *best.overrides):
            line += ["--set", text]
        line += [] if epochs is None else ["--epochs", str(epochs)]
        # neither the folder of the unchanged recipe nor that of nine tenths of the data
        line += ["--out", str(folder / f"{best.folder}-whole")]
        line += [] if data == DATA else ["--data", str(data)]
        summary = {
            "recipe": first.name,
            "seed": seed,
            "score": scored or list(first.compress.to),
            "points": [asdict(point) for point in points],
            "best": list(best.overrides),
            "next": shlex.join(line),
        }
        write_atomically(folder / FILE, (json.dumps(summary, indent=2) + "\n").encode())
        typer.echo(f"sweep: {folder / FILE}")
        typer.echo(f"best: {' '.join(best.overrides)}; next:\n{summary['next']}")
