"""torchcram export."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line, usage
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

if TYPE_CHECKING:
    from rich.table import Table

    from torchcram.experiments.evaluation.results import Result
    from torchcram.experiments.export import Exported


@app.command()
def export(
    run: RunFolder,
    to: Targets = None,
    kind: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="Format of the files: torchcram, safetensors, transformers, compressed-tensors, "
            "onnx or gguf.",
        ),
    ] = "torchcram",
    values: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of weights that are not quantized: fp32, fp16 or bf16.",
            show_default="as they are",
        ),
    ] = None,
    embeddings: Annotated[
        str | None,
        typer.Option(
            metavar="OP",
            help="Quantization of embeddings, such as int8.",
            show_default="as they are",
        ),
    ] = None,
    gguf_type: Annotated[
        str | None,
        typer.Option(
            metavar="TYPE",
            help="Type of the weights in GGUF files: f32, f16, q8_0 or q4_0.",
            show_default="by target",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for the files.", show_default="RUN/export"),
    ] = None,
    json: ResultFile = None,
    data: DataFolder = DATA,
    device: DeviceName = "auto",
    download: Download = False,
) -> None:
    """Compress a trained model and write files to deploy, which include the measured accuracy.

    The format torchcram is the compact one; the others store the same weights, zeros included.
    With compressed-tensors, onnx and gguf, quantized weights are stored as integers.
    """
    with errors_in_a_line():
        from torchcram.cli.output import result_output, show
        from torchcram.cli.progress import watching
        from torchcram.experiments.export import check_export, check_options
        from torchcram.experiments.export import export as write_files
        from torchcram.experiments.training.run_folder import MODEL
        from torchcram.experiments.training.trainer import load_trained

        check_targets(to)
        with usage():
            check_options(kind, values, embeddings, to or (), gguf_type)
        where = find_device(device)
        trained = load_trained(run, where)
        targets = to or list(trained.recipe.compress.to)
        check_export(trained, kind, values, embeddings, targets, gguf_type)
        images = load(trained.recipe, data, download=download)
        with result_output(json) as write:
            with watching() as watch:
                result, files = write_files(
                    trained,
                    images,
                    out or run / "export",
                    targets=targets,
                    kind=kind,
                    values=values,
                    embeddings=embeddings,
                    gguf_type=gguf_type,
                    device=where,
                    progress=watch.pieces("compressing", len(targets)),
                )
            show(_table(result, files, (run / MODEL).stat().st_size))
            write(result)


def _table(result: Result, files: Sequence[Exported], dense: int) -> Table:
    """Returns a row per file, compared with the file of the dense model."""
    from rich.table import Table
    from rich.text import Text

    from torchcram.experiments.metrics import change_from
    from torchcram.report.summary import change_text, in_percent, score_text

    (seed,) = result.seeds
    metric = result.metric
    table = Table(
        title=Text(f"Files, and test {in_percent(metric)} on {result.data}"),
        caption="as is: before batch-norm tuning and rounding; smaller: against the file of the "
        "dense model",
    )
    table.add_column("target", no_wrap=True)
    for column in ("bytes", "smaller", "as is", metric, "vs dense"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("file", overflow="fold")
    accuracy = score_text(seed.dense, metric)
    table.add_row("dense", f"{dense:,}", "", "", accuracy, "", "", end_section=True)
    for file in files:
        target = file.target
        table.add_row(
            Text(target.operator),
            f"{file.size:,}",
            f"{dense / file.size:.1f}x",
            score_text(target.before, metric),
            score_text(target.after, metric),
            change_text(change_from(seed.dense, target.after, metric), metric),
            Text(str(file.path)),
        )
    return table
