"""torchcram finetune."""

from __future__ import annotations

from dataclasses import replace
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
    NewRunFolder,
    NewRunSeed,
    ResultsFolder,
    RunFolder,
    Sets,
    check_epochs,
    check_sets,
    find_device,
    load,
    step_maker,
)


@app.command()
def finetune(
    run: RunFolder,
    at: Annotated[
        str,
        typer.Option(
            metavar="OP",
            help="Operator such as global:0.9, or pruner, whose zeros are kept; or dense.",
        ),
    ],
    epochs: Epochs = None,
    sets: Sets = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V,V",
            help="Values to try for text models: optimizer.lr=3e-5,8e-5. The best on the samples "
            "that early stopping holds out is shown. Repeatable.",
        ),
    ] = None,
    results: ResultsFolder = None,
    out: NewRunFolder = None,
    seed: NewRunSeed = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    eager: Eager = False,
    eval_interval: EvalInterval = 1,
    download: Download = False,
) -> None:
    """Compress a trained model, then fine-tune it with the masks held.

    By default it trains for a tenth of the epochs, from a tenth of the learning rate, with plain
    steps. Text models train for at most two epochs from 5e-5, with early stopping on a tenth of
    the training set.
    """
    with errors_in_a_line(), stoppable():
        from torchcram.cli.output import finetuned_table, grid_table, show
        from torchcram.cli.progress import watching
        from torchcram.experiments.finetuning import finetune as train_further
        from torchcram.experiments.finetuning import finetune_grid
        from torchcram.experiments.io.files import slug
        from torchcram.experiments.recipe.overrides import finetune_recipe, read_at
        from torchcram.experiments.results_store import (
            add_to_results,
            check_results,
            load_or_measure,
        )
        from torchcram.experiments.sweep import read_grid
        from torchcram.experiments.training.run_folder import read_run
        from torchcram.report.results_table import result_table

        changes = tuple(sets or ())
        check_epochs(epochs, [*changes, *(grid or ())])
        check_sets(changes)
        with usage():
            operator = read_at(at)
            grid_points = read_grid(grid or ())
        trained_by, info = read_run(run)
        recipes = {
            point: finetune_recipe(trained_by, at, epochs=epochs, overrides=[*changes, *point])
            for point in grid_points
        }
        recipe = finetune_recipe(trained_by, at, epochs=epochs, overrides=changes)
        folder = out or _beside(run, f"finetune-{slug(operator)}")
        where = find_device(device)
        images = load(recipe, data, download=download)
        if results is not None:
            check_results(results, recipe, info.seed if seed is None else seed)  # before the work
        chosen: tuple[str, ...] = ()
        with watching() as watch:
            if not grid:
                finetuned = train_further(
                    run,
                    at,
                    folder,
                    recipe=recipe,
                    data=images,
                    device=where,
                    seed=seed,
                    make_step=step_maker(eager),
                    eval_interval=eval_interval,
                    progress=watch.training("fine-tuning"),
                )
            else:
                search = finetune_grid(
                    run,
                    at,
                    folder,
                    recipes=recipes,
                    data=images,
                    device=where,
                    seed=seed,
                    make_step=step_maker(eager),
                    progress=watch.training,
                )
                best = search.best
                folder, finetuned, chosen = best.folder, best.finetuned, best.overrides
        if grid:
            show(grid_table(search))
        show(finetuned_table(finetuned))
        if not finetuned.origin.holds_masks:  # still dense: it can be compressed to anything
            result = load_or_measure(folder, finetuned.trained, images, device=where)
            show(result_table(result))
        typer.echo(f"run: {folder}")
        if results is not None:
            held = finetuned.origin.holds_masks
            seed_result = finetuned.as_result() if held else result.seeds[0]
            path = add_to_results(results, recipe, replace(seed_result, chosen=chosen))
            typer.echo(f"result: {path}")


def _beside(run: Path, suffix: str) -> Path:
    run = run if run.name else run.resolve()
    return run.with_name(f"{run.name}-{suffix}")
