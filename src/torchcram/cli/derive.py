"""torchcram finetune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe


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
        from torchcram.experiments.io.files import slug
        from torchcram.experiments.recipe.overrides import finetune_recipe, read_at
        from torchcram.experiments.sweep import read_grid
        from torchcram.experiments.training.run_folder import read_run

        check_epochs(epochs, [*(sets or ()), *(grid or ())])
        check_sets(sets)
        with usage():
            read_at(at)
            grid_points = read_grid(grid or ())
        trained_by = read_run(run)[0]
        recipes = {
            point: finetune_recipe(trained_by, at, epochs=epochs, overrides=[*(sets or ()), *point])
            for point in grid_points
        }
        _train_on(
            run,
            at,
            out or _beside(run, f"finetune-{slug(read_at(at))}"),
            recipe=finetune_recipe(trained_by, at, epochs=epochs, overrides=sets or ()),
            recipes=recipes,
            results=results,
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
    recipes: Mapping[tuple[str, ...], Recipe],
    results: Path | None,
    seed: int | None,
    data: Path,
    device: str,
    eager: bool,
    eval_interval: int,
    download: bool,
) -> None:
    """Compresses the model of a run, trains it further, and shows the results.

    Args:
        run: Folder of a finished training.
        at: Operator as text, or "dense".
        out: Folder of the new run; with a grid, the folder that holds all its runs.
        recipe: Recipe without the changes of a grid.
        recipes: Recipes by their changes; the best of several counts.
        results: Folder of results that the result is added to.
        seed: Seed of the new run; by default that of `run`.
        data: Folder of the data.
        device: Name of the device.
        eager: Whether to take eager steps, without CUDA graphs.
        eval_interval: Number of epochs between two tests.
        download: Whether to download datasets that torchvision provides.
    """
    from torchcram.cli.output import derived_table, grid_table, show
    from torchcram.cli.progress import watching
    from torchcram.experiments.finetuning import finetune, finetune_grid
    from torchcram.experiments.results_store import (
        add_to_results,
        check_results,
        load_or_measure,
    )
    from torchcram.report.results_table import result_table

    where = find_device(device)
    chosen: tuple[str, ...] = ()
    images = load(recipe, data, download=download)
    if results is not None:
        check_results(results, recipe, seed or 0)  # rather than after the work
    with watching() as watch:
        if () in recipes:
            derived = finetune(
                run,
                at,
                out,
                recipe=recipe,
                data=images,
                device=where,
                seed=seed,
                make_step=step_maker(eager),
                eval_interval=eval_interval,
                progress=watch.training("fine-tuning"),
            )
        else:
            grid = finetune_grid(
                run,
                at,
                out,
                recipes=recipes,
                data=images,
                device=where,
                seed=seed,
                make_step=step_maker(eager),
                progress=watch.training,
            )
            best = grid.best
            out, derived, chosen = best.folder, best.finetuned, best.overrides
    if () not in recipes:
        show(grid_table(grid))
    show(derived_table(derived))
    if not derived.origin.holds_masks:  # still dense: it can be compressed to anything
        result = load_or_measure(out, derived.trained, images, device=where)
        show(result_table(result))
    typer.echo(f"run: {out}")
    if results is not None:
        held = derived.origin.holds_masks
        seed_result = derived.as_result() if held else result.seeds[0]
        path = add_to_results(results, recipe, replace(seed_result, chosen=chosen))
        typer.echo(f"result: {path}")


def _beside(run: Path, suffix: str) -> Path:
    run = run if run.name else run.resolve()
    return run.with_name(f"{run.name}-{suffix}")
