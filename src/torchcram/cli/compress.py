"""torchcram compress and torchcram evaluate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line
from torchcram.cli.options import (
    DATA,
    DataFolder,
    DeviceName,
    Download,
    ResultFile,
    RunFolder,
    Targets,
    check_targets,
    find_device,
    load,
)


@app.command()
def compress(
    run: RunFolder,
    to: Targets = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="that of the recipe",
            help="Number of training samples for batch-norm tuning, wanda and sparsegpt.",
        ),
    ] = None,
    bnt_trials: Annotated[
        int,
        typer.Option(
            min=1, help="Number of calibration sets for batch-norm tuning; mean and std are shown."
        ),
    ] = 1,
    save: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder for the compressed models, tuned on the first calibration set.",
        ),
    ] = None,
    json: ResultFile = None,
    results: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder of results that the targets are added to.",
        ),
    ] = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    download: Download = False,
) -> None:
    """Compress a trained model in one shot and test it, before and after batch-norm tuning.

    Without --to, the targets are those of the recipe, and the result is also written to the run
    folder. Pruners (obs@..., wanda@..., sparsegpt@...) look at training batches first.
    """
    with errors_in_a_line():
        from torchcram.cli.output import result_output, show
        from torchcram.cli.progress import watching
        from torchcram.experiments.evaluation.results import write_result
        from torchcram.experiments.recipe.overrides import with_targets
        from torchcram.experiments.results_store import (
            RESULT,
            add_to_results,
            check_results,
            measure,
            require_same_training,
        )
        from torchcram.experiments.training.trainer import load_trained
        from torchcram.report.results_table import result_table

        check_targets(to)
        where = find_device(device)
        trained = load_trained(run, where)
        recipe = with_targets(trained.recipe, to) if to else trained.recipe
        if samples is not None:
            changed = replace(recipe.compress, calibration_samples=samples)
            recipe = replace(recipe, compress=changed)
        if results is not None:
            check_results(results, trained.recipe, trained.info.seed)
            require_same_training(results, trained)
        dataset = load(recipe, data, download=download)
        with result_output(json) as write:
            with watching() as watch:
                result = measure(
                    replace(trained, recipe=recipe),
                    dataset,
                    device=where,
                    trials=bnt_trials,
                    save_to=save,
                    progress=watch.pieces("compressing", len(recipe.compress.to)),
                )
            show(result_table(result))
            if not to and not samples:
                write_result(result, run / RESULT)
                typer.echo(f"result: {run / RESULT}")
            write(result)
            if results is not None:
                (seed,) = result.seeds
                if samples not in (None, trained.recipe.compress.calibration_samples):
                    targets = tuple(replace(target, samples=samples) for target in seed.targets)
                    seed = replace(seed, targets=targets)
                typer.echo(f"result: {add_to_results(results, trained.recipe, seed)}")
            if save is not None:
                typer.echo(f"compressed models: {save}")


@app.command()
def evaluate(
    run: RunFolder,
    model: Annotated[
        Path | None,
        typer.Option(
            dir_okay=False,
            help="File of weights to test instead, compact or plain, as written by "
            "`compress --save` or `export`.",
        ),
    ] = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    download: Download = False,
) -> None:
    """Test a trained model, or a file with its compressed weights, on the test split."""
    with errors_in_a_line():
        from torchcram import sparsity
        from torchcram.experiments.evaluation.compressed_models import score_on_test
        from torchcram.experiments.io.weights import load_weights_
        from torchcram.experiments.recipe.build import target_weights
        from torchcram.experiments.training.trainer import load_trained
        from torchcram.report.summary import percent_sign, score_text

        where = find_device(device)
        trained = load_trained(run, where)
        if model is not None:
            load_weights_(trained.model, model)
        dataset = load(trained.recipe, data, download=download)
        score = score_on_test(trained.model, trained.recipe, dataset, device=where)
        zeros = sparsity(target_weights(trained.recipe, trained.model))
        measured = {score.metric: score.value, **(score.others or {})}
        scores = ", ".join(
            f"{name} {score_text(value, name)}{percent_sign(name)}"
            for name, value in measured.items()
        )
        tested = trained.recipe.build_task().count_test(dataset)
        typer.echo(
            f"{model or run}: {scores} on the {tested} of {dataset.name}, "
            f"sparsity {100 * zeros:.2f} %"
        )
