"""torchcram bench."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from torchcram.cli.app import app
from torchcram.cli.errors import errors_in_a_line, usage
from torchcram.cli.options import (
    DATA,
    DataFolder,
    DeviceName,
    Download,
    ResultFile,
    Targets,
    check_targets,
    find_device,
    load,
)
from torchcram.cli.progress import say

BATCHES = (1, 16)


@app.command()
def bench(
    source: Annotated[
        Path,
        typer.Argument(metavar="RUN_OR_FILE", help="Folder of a finished run, or a compact file."),
    ],
    to: Targets = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="1 16", help="Batch size. Repeatable."),
    ] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(min=1, show_default="that of torch", help="Number of threads. Repeatable."),
    ] = None,
    engines: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            show_default="all but torchcram-compiled, and compiled-bf16 only with AMX",
            help="Engines, separated by commas: torch, compiled, compiled-bf16, onnxruntime, "
            "torchcram, torchcram-compiled; on a GPU torch, compiled, torchcram; for generation "
            "torch, torch-bf16, torchcram, torchcram-bf16, torchcram-int8, torchcram-int4.",
        ),
    ] = None,
    forward: Annotated[
        bool,
        typer.Option("--forward/--no-forward", help="Time whole batches."),
    ] = True,
    generation: Annotated[
        bool | None,
        typer.Option(
            "--generation/--no-generation",
            show_default="generation of language models on the CPU",
            help="Time the generation of text.",
        ),
    ] = None,
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="TOKENS",
            show_default="128, fewer if the model takes fewer",
            help="Length of the prompt that text is generated from.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="64, fewer if the model takes fewer",
            help="Number of tokens that are generated and timed after the prompt.",
        ),
    ] = None,
    scored_tokens: Annotated[
        int | None,
        typer.Option(
            min=2,
            show_default="2048; none with --no-accuracy",
            help="Number of test tokens that the perplexity of every engine is measured on.",
        ),
    ] = None,
    gguf: Annotated[
        list[Path] | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="GGUF file that llama.cpp generates with, for comparison. Repeatable.",
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, show_default="25, fewer if slow", help="Number of timed rounds."),
    ] = None,
    accuracy: Annotated[
        bool,
        typer.Option(
            "--accuracy/--no-accuracy", help="Test models whose accuracy is not in result.json."
        ),
    ] = True,
    json: ResultFile = None,
    data: DataFolder = DATA,
    device: DeviceName = "cpu",
    download: Download = False,
) -> None:
    """Measure models side by side: accuracy, file sizes, latency and throughput.

    The dense model and each target run in every engine, in turns, on real test data. Language
    models also generate text, on the CPU. The result is also written to the run folder, where
    `torchcram report` finds it.
    """
    with errors_in_a_line():
        import torch

        from torchcram.cli.output import result_output, show
        from torchcram.experiments.bench.candidates import open_source
        from torchcram.experiments.bench.generation import SCORED, GenerationPlan
        from torchcram.experiments.bench.record import FILES, write_bench
        from torchcram.experiments.bench.run import Plan, choose_engines, run_bench
        from torchcram.report.bench import size_table, speed_tables
        from torchcram.report.generation import generation_tables

        where = find_device(device)
        names = None if engines is None else [name.strip() for name in engines.split(",")]
        check_targets(to)
        opened = open_source(source, to or ())
        can_generate = opened.recipe.build_task().can_generate
        about_text = {"prompt": prompt, "tokens": tokens, "scored-tokens": scored_tokens}
        given = [name for name, value in {**about_text, "gguf": gguf}.items() if value is not None]
        given += ["generation"] if generation else []
        with usage():
            if batch and not forward:
                raise ValueError("--batch is for whole batches, which --no-forward leaves out")
            if given and (not can_generate or where.type != "cpu" or generation is False):
                raise ValueError(f"--{given[0]} is for the generation of language models on a CPU")
            chosen = choose_engines(
                names,
                where,
                forward=forward,
                generation=can_generate and generation is not False,
                gguf=bool(gguf),
            )
            plan = Plan(
                chosen.forward,
                tuple(batch or BATCHES),
                tuple(threads or [torch.get_num_threads()]),
                rounds,
                generation=None
                if chosen.generation is None
                else GenerationPlan(
                    chosen.generation,
                    prompt=prompt,
                    tokens=tokens,
                    gguf=tuple(gguf or ()),
                    scored=scored_tokens or (SCORED if accuracy else None),
                ),
            )
        if can_generate and where.type != "cpu" and generation is not False:
            say("generation is timed on the CPU alone; this benchmark leaves it out")
        samples = load(opened.recipe, data, download=download)
        candidates = opened.candidates(samples, device=where, accuracy=accuracy, report=say)
        with result_output(json) as write:
            with tempfile.TemporaryDirectory() as folder:
                result = run_bench(
                    candidates,
                    opened.recipe,
                    samples,
                    plan=plan,
                    device=where,
                    folder=Path(folder),
                    report=say,
                )
            show(size_table(result))
            for table in (*speed_tables(result), *generation_tables(result)):
                show(table)
            if source.is_dir():
                write_bench(result, source / FILES[where.type])
                typer.echo(f"result: {source / FILES[where.type]}")
            write(result)
