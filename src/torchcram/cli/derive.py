"""torchcram finetune and torchcram transfer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line, stoppable, usage
from torchcram.cli.options import (
    DATA,
    DataFolder,
    DeviceName,
    Download,
    Eager,
    Epochs,
    EvalInterval,
    RunFolder,
    Sets,
    check_epochs,
    check_sets,
)

At = Annotated[
    str,
    typer.Option(
        metavar="OP", help="Operator, as global:0.9, or pruner, whose zeros stay; or dense."
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(file_okay=False, show_default="beside RUN", help="Folder of the new run."),
]
Seed = Annotated[int | None, typer.Option(min=0, help="Instead of that of the run.")]


@app.command()
def finetune(
    run: RunFolder,
    at: At,
    epochs: Epochs = None,
    sets: Sets = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V",
            help="Values to try, texts only: optimizer.lr=3e-5,8e-5. The best on what early "
            "stopping holds out is shown. Repeatable.",
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder of results to put the result into as well."),
    ] = None,
    out: Out = None,
    seed: Seed = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    eager: Eager = False,
    eval_interval: EvalInterval = 1,
    download: Download = False,
) -> None:
    """Compress a trained model, then train on with the masks held.

    By default for a tenth of its epochs, from a tenth of its learning rate, with plain steps. Texts
    for at most two epochs from 5e-5, ended early by a tenth of the training set.
    """
    with errors_in_a_line(), stoppable():
        from torchcram.cli.derive_runs import train_on
        from torchcram.experiments.io.files import slug
        from torchcram.experiments.recipe.overrides import finetune_recipe, read_at
        from torchcram.experiments.sweep import read_grid
        from torchcram.experiments.training.run_folder import read_run

        check_epochs(epochs, [*(sets or ()), *(grid or ())])
        check_sets(sets)
        with usage():
            read_at(at)
            grid_points = read_grid(grid or ())
        given = read_run(run)[0]
        recipes = {
            point: finetune_recipe(given, at, epochs=epochs, overrides=[*(sets or ()), *point])
            for point in grid_points
        }
        train_on(
            run,
            at,
            out or _beside(run, f"finetune-{slug(read_at(at))}"),
            recipe=finetune_recipe(given, at, epochs=epochs, overrides=sets or ()),
            recipes=recipes,
            new_head=False,
            results=results,
            seed=seed,
            data=data,
            device=device,
            eager=eager,
            eval_interval=eval_interval,
            download=download,
        )


@app.command()
def transfer(
    run: RunFolder,
    at: At,
    to: Annotated[str, typer.Option(metavar="RECIPE", help="Of the other data.")],
    epochs: Epochs = None,
    sets: Sets = None,
    out: Out = None,
    seed: Seed = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    eager: Eager = False,
    eval_interval: EvalInterval = 1,
    download: Download = False,
) -> None:
    """Compress a trained model, give it a new head, train it on other data, the masks held.

    The model is that of RUN; all else is as RECIPE says.
    """
    with errors_in_a_line(), stoppable():
        from torchcram.cli.derive_runs import train_on
        from torchcram.experiments.io.files import slug
        from torchcram.experiments.recipe import load_recipe
        from torchcram.experiments.recipe.overrides import read_at, transfer_recipe
        from torchcram.experiments.training.run_folder import read_run

        check_epochs(epochs, sets)
        check_sets(sets)
        with usage():
            read_at(at)
        target = load_recipe(to)
        recipe = transfer_recipe(read_run(run)[0], at, target, epochs=epochs, overrides=sets or ())
        train_on(
            run,
            at,
            out or _beside(run, f"transfer-{slug(read_at(at))}-{slug(target.name)}"),
            recipe=recipe,
            recipes={(): recipe},
            new_head=True,
            results=None,
            seed=seed,
            data=data,
            device=device,
            eager=eager,
            eval_interval=eval_interval,
            download=download,
        )


def _beside(run: Path, what: str) -> Path:
    run = run if run.name else run.resolve()
    return run.with_name(f"{run.name}-{what}")
