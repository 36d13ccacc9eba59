"""torchcram finetune and torchcram transfer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line, stoppable
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
    find_device,
    load,
    step_maker,
)

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe

At = Annotated[
    str, typer.Option(metavar="OP", help="Operator, as global:0.9, whose zeros stay; or dense.")
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
    out: Out = None,
    seed: Seed = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    eager: Eager = False,
    eval_interval: EvalInterval = 1,
    download: Download = False,
) -> None:
    """Compress a trained model, then train on with the masks held.

    By default for a tenth of its epochs, from a tenth of its learning rate, with plain steps.
    """
    with errors_in_a_line(), stoppable():
        from torchcram.experiments.recipe_changes import as_name, finetune_recipe, read_at
        from torchcram.experiments.run_folder import read_run

        check_epochs(epochs, sets)
        recipe = finetune_recipe(read_run(run)[0], at, epochs=epochs, overrides=sets or ())
        _train_on(
            run,
            at,
            out or _beside(run, f"finetune-{as_name(read_at(at))}"),
            recipe=recipe,
            new_head=False,
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
        from torchcram.experiments.recipe import load_recipe
        from torchcram.experiments.recipe_changes import as_name, read_at, transfer_recipe
        from torchcram.experiments.run_folder import read_run

        check_epochs(epochs, sets)
        target = load_recipe(to)
        recipe = transfer_recipe(read_run(run)[0], at, target, epochs=epochs, overrides=sets or ())
        _train_on(
            run,
            at,
            out or _beside(run, f"transfer-{as_name(read_at(at))}-{as_name(target.name)}"),
            recipe=recipe,
            new_head=True,
            seed=seed,
            data=data,
            device=device,
            eager=eager,
            eval_interval=eval_interval,
            download=download,
        )


def _train_on(
    run: Path,
    at: str,
    out: Path,
    *,
    recipe: Recipe,
    new_head: bool,
    seed: int | None,
    data: Path,
    device: str,
    eager: bool,
    eval_interval: int,
    download: bool,
) -> None:
    from torchcram.cli.progress import watching
    from torchcram.cli.tables import derived_table, show
    from torchcram.experiments.derived import finetune as train_on
    from torchcram.experiments.outcome import outcome
    from torchcram.report.results_table import result_table

    where = find_device(device)
    images = load(recipe, data, download=download)
    with watching() as watch:
        derived = train_on(
            run,
            at,
            out,
            recipe=recipe,
            data=images,
            device=where,
            new_head=new_head,
            seed=seed,
            make_step=step_maker(eager),
            eval_interval=eval_interval,
            progress=watch.training("transfer" if new_head else "fine-tuning"),
        )
    show(derived_table(derived))
    if not derived.origin.held:  # still dense: it can be compressed to anything
        show(result_table(outcome(out, derived.trained, images, device=where)))
    typer.echo(f"run: {out}")


def _beside(run: Path, what: str) -> Path:
    run = run if run.name else run.resolve()
    return run.with_name(f"{run.name}-{what}")
