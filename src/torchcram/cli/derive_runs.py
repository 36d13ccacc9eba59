"""Fine-tuning and transfer, once the command has said what to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from torchcram.cli.options import find_device, load, step_maker
from torchcram.cli.progress import watching
from torchcram.cli.tables import derived_table, grid_table, show
from torchcram.experiments.finetuning import finetune, finetune_grid
from torchcram.experiments.results_store import add_to_results, check_results, load_or_measure
from torchcram.report.results_table import result_table

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe


def train_on(
    run: Path,
    at: str,
    out: Path,
    *,
    recipe: Recipe,
    recipes: Mapping[tuple[str, ...], Recipe],
    new_head: bool,
    results: Path | None,
    seed: int | None,
    data: Path,
    device: str,
    eager: bool,
    eval_interval: int,
    download: bool,
) -> None:
    """Compresses the model of a run, trains it on, and shows what it comes to.

    Args:
        run: folder of a finished training.
        at: an operator as text, or "dense".
        out: folder of the new run; of several, the folder that theirs are in.
        recipe: without what sets the others apart.
        recipes: by what sets them apart; of several, the best one counts.
        new_head: whether it is a transfer.
        results: folder of results to put the result into as well.
        seed: instead of that of the run.
        data: folder of the data.
        device: its name.
        eager: take plain steps.
        eval_interval: test after every so many epochs.
        download: data that torchvision knows.
    """
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
                new_head=new_head,
                seed=seed,
                make_step=step_maker(eager),
                eval_interval=eval_interval,
                progress=watch.training("transfer" if new_head else "fine-tuning"),
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
            best = grid.trials[0]
            out, derived, chosen = best.folder, best.finetuned, best.overrides
    if () not in recipes:
        show(grid_table(grid))
    show(derived_table(derived))
    if not derived.origin.holds_masks:  # still dense: it can be compressed to anything
        found = load_or_measure(out, derived.trained, images, device=where)
        show(result_table(found))
    typer.echo(f"run: {out}")
    if results is not None:
        held = derived.origin.holds_masks
        seed_result = derived.as_result() if held else found.seeds[0]
        path = add_to_results(results, recipe, replace(seed_result, chosen=chosen))
        typer.echo(f"result: {path}")
