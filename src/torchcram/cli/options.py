"""Options that several commands have, and what they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchcram.cli.errors import UsageError, usage

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.ranks import Ranks
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.steps import MakeStep

DataFolder = Annotated[
    Path, typer.Option("--data", envvar="TORCHCRAM_DATA", help="Where the data lies.")
]
Download = Annotated[bool, typer.Option("--download", help="Download data that torchvision knows.")]
DeviceName = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:1.")]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the recipe: cram.rho=0.1. Repeatable."),
]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of those of the recipe.")]
Eager = Annotated[bool, typer.Option("--eager", help="Take plain steps, slower on a GPU.")]
Compile = Annotated[
    bool,
    typer.Option("--compile", help="Compile steps on a GPU: faster, after about a minute."),
]
EvalInterval = Annotated[int, typer.Option(min=1, help="Test after every so many epochs.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="OP",
        show_default="those of the recipe",
        help="Operator, as global:0.9, global:0.8+int4 or obs@uniform:0.7. Repeatable.",
    ),
]
ResultFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        allow_dash=True,
        help="File for the result; - is standard output, which then gets nothing else.",
    ),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", file_okay=False, help="Folder of a finished run.")
]

DATA = Path("data")
RUNS = Path("runs")


def find_device(name: str) -> torch.device:
    """Returns the device of a name; "auto" is a GPU where there is one.

    Raises:
        UsageError: for a name that is no device.
        ValueError: if there is no such device here.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: allowed are auto, cpu, cuda, cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: allowed are auto, cpu, cuda, cuda:1")
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(f"--device {name}: torch finds {gpus} GPUs on this machine")
    return device


def find_device_of(ranks: Ranks, name: str) -> torch.device:
    """Returns the device of this process, on a machine with several GPUs one of its own.

    Raises:
        ValueError: if there is no such device here, or not one for every process.
    """
    device = find_device(name)
    if ranks.world_size == 1 or device.type == "cpu":
        return device
    import torch

    if device.index is not None:
        raise ValueError(f"--device {name}: torchrun says which GPU is whose; allowed: cpu, cuda")
    gpus = torch.cuda.device_count()
    if ranks.local_world_size > gpus:
        raise ValueError(
            f"--device {name}: {ranks.local_world_size} processes need a GPU each, and torch finds "
            f"{gpus} on this machine (--nproc-per-node {gpus}, or --device cpu)"
        )
    own = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(own)
    return own


def check_epochs(epochs: int | None, overrides: Sequence[str] | None) -> None:
    """Refuses epochs that are given twice."""
    keys = [text.partition("=")[0].strip() for text in overrides or ()]
    if epochs is not None and "train.epochs" in keys:
        raise UsageError("--epochs and train.epochs exclude each other: they say the same")


def check_sets(sets: Sequence[str] | None) -> None:
    """Refuses values of --set that are not of the form KEY=VALUE."""
    from torchcram.experiments.io.yaml_text import override

    with usage():
        override({}, sets or ())


def check_targets(targets: Sequence[str] | None) -> None:
    """Refuses operators that a model cannot be compressed to."""
    from torchcram.experiments.recipe import CompressConfig

    with usage():
        if targets:
            CompressConfig(to=tuple(targets))


def step_maker(eager: bool, compiled: bool = False) -> MakeStep:
    """Returns how steps are taken."""
    from functools import partial

    from torchcram.experiments.training.cuda_graph_steps import make_step
    from torchcram.experiments.training.steps import EagerStep

    if eager and compiled:
        raise UsageError("--eager and --compile exclude each other")
    return EagerStep if eager else partial(make_step, compiled=compiled)


def load_in(ranks: Ranks, recipe: Recipe, folder: Path, *, download: bool = False) -> Dataset:
    """Loads the data in every process, on each machine first in one: it may download or pack it.

    Raises:
        ValueError: in every process, if one cannot.
    """
    if ranks.world_size == 1:
        return load(recipe, folder, download=download)

    def first() -> Dataset | None:
        return None if ranks.local_rank else load(recipe, folder, download=download)

    found = ranks.run_on_all(first)
    return ranks.run_on_all(lambda: found or load(recipe, folder))


def load(recipe: Recipe, folder: Path, *, download: bool = False) -> Dataset:
    """Loads the data of a recipe; says what takes long."""

    def say(line: str) -> None:
        typer.echo(line, err=True)

    data: Dataset = recipe.build_task().load(
        folder, batch_size=recipe.train.batch_size, download=download, report=say
    )
    return data
