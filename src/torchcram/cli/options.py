"""Options that several commands share, and the objects they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from torchcram.cli.errors import UsageError, usage
from torchcram.cli.progress import say

if TYPE_CHECKING:
    import torch

    from torchcram.experiments.ranks import Ranks
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.steps import MakeStep

DataFolder = Annotated[
    Path, typer.Option("--data", envvar="TORCHCRAM_DATA", help="Folder of the datasets.")
]
Download = Annotated[
    bool, typer.Option("--download", help="Download a dataset that torchvision provides.")
]
DeviceName = Annotated[str, typer.Option("--device", help="Device: auto, cpu, cuda or cuda:1.")]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Change to the recipe, such as cram.rho=0.1. Repeatable."
    ),
]
Epochs = Annotated[
    int | None, typer.Option(min=1, help="Number of epochs, instead of that of the recipe.")
]
Eager = Annotated[
    bool, typer.Option("--eager", help="Take eager steps, without CUDA graphs; slower on a GPU.")
]
Compile = Annotated[
    bool,
    typer.Option(
        "--compile", help="Compile the steps on a GPU: faster, after about a minute of compilation."
    ),
]
EvalInterval = Annotated[int, typer.Option(min=1, help="Number of epochs between two tests.")]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--to",
        metavar="OP",
        show_default="those of the recipe",
        help="Operator such as global:0.9, global:0.8+int4 or obs@uniform:0.7. Repeatable.",
    ),
]
ResultFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        dir_okay=False,
        allow_dash=True,
        help="File for the result; - is standard output, which then holds nothing else.",
    ),
]
ResultsFolder = Annotated[
    Path | None,
    typer.Option(
        "--results", file_okay=False, help="Folder of results that the result is added to."
    ),
]
Parallel = Annotated[bool, typer.Option("--parallel", help="Train all runs at the same time.")]
Jobs = Annotated[
    int | None, typer.Option("--jobs", min=1, help="Number of runs at a time, with --parallel.")
]
NewRunFolder = Annotated[
    Path | None,
    typer.Option(
        "--out",
        file_okay=False,
        show_default="beside RUN",
        help="Folder of the new run; of several, the folder that holds them.",
    ),
]
NewRunSeed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Seed of the new run, instead of that of RUN."),
]
RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", file_okay=False, help="Folder of a finished run.")
]

DATA = Path("data")
RUNS = Path("runs")


@dataclass(frozen=True)
class RunOptions:
    """Options that `train` and `transfer` have in common, and all runs of a command share."""

    data: Path
    sets: tuple[str, ...]
    device: str
    eager: bool
    eval_interval: int
    results: Path | None
    download: bool

    def arguments(self, device: torch.device) -> list[str]:
        """Returns these options as arguments of a command that does one of the runs alone.

        The data is loaded by then, so nothing is downloaded.

        Args:
            device: Device that `self.device` stands for.
        """
        arguments = ["--data", str(self.data), "--device", str(device)]
        arguments += ["--eval-interval", str(self.eval_interval)]
        for text in self.sets:
            arguments += ["--set", text]
        if self.results is not None:
            arguments += ["--results", str(self.results)]
        if self.eager:
            arguments += ["--eager"]
        return arguments


def find_device(name: str) -> torch.device:
    """Returns the device of a name; "auto" is a GPU where there is one.

    Raises:
        UsageError: If the name is not that of a device.
        ValueError: If the machine has no such device.
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
    """Returns the device of this rank; on a machine with several GPUs, a GPU of its own.

    Raises:
        ValueError: If the machine has no such device, or not enough for all its ranks.
    """
    device = find_device(name)
    if ranks.world_size == 1 or device.type == "cpu":
        return device
    import torch

    if device.index is not None:
        raise ValueError(f"--device {name}: torchrun assigns the GPUs; allowed: cpu, cuda")
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
    """Raises UsageError if the epochs are given twice."""
    keys = [text.partition("=")[0].strip() for text in overrides or ()]
    if epochs is not None and "train.epochs" in keys:
        raise UsageError("--epochs and train.epochs exclude each other: they set the same value")


def check_jobs(jobs: int | None, parallel: bool) -> None:
    """Raises UsageError for --jobs without --parallel."""
    if jobs is not None and not parallel:
        raise UsageError("--jobs needs --parallel")


def check_sets(sets: Sequence[str] | None) -> None:
    """Raises UsageError for values of --set that are not of the form KEY=VALUE."""
    from torchcram.experiments.io.yaml_text import override

    with usage():
        override({}, sets or ())


def check_targets(targets: Sequence[str] | None) -> None:
    """Raises UsageError for operators that a model cannot be compressed to."""
    from torchcram.experiments.io.dataclass_io import BadValue
    from torchcram.experiments.recipe import CompressConfig

    try:
        if targets:
            CompressConfig(to=tuple(targets))
    except BadValue as error:
        raise UsageError(f"--to {error.problem}; allowed: {error.allowed}") from None


def step_maker(eager: bool, compiled: bool = False) -> MakeStep:
    """Returns the function that makes training steps."""
    from functools import partial

    from torchcram.experiments.training.cuda_graph_steps import make_step
    from torchcram.experiments.training.steps import EagerStep

    if eager and compiled:
        raise UsageError("--eager and --compile exclude each other")
    return EagerStep if eager else partial(make_step, compiled=compiled)


def load_in(ranks: Ranks, recipe: Recipe, folder: Path, *, download: bool = False) -> Dataset:
    """Loads the dataset in every rank; local rank 0 goes first, since it may download or pack it.

    Raises:
        ValueError: If any rank cannot load it; all ranks raise it.
    """
    if ranks.world_size == 1:
        return load(recipe, folder, download=download)

    def first() -> Dataset | None:
        return None if ranks.local_rank else load(recipe, folder, download=download)

    data = ranks.run_on_all(first)
    return ranks.run_on_all(lambda: data or load(recipe, folder))


def load(recipe: Recipe, folder: Path, *, download: bool = False) -> Dataset:
    """Loads the dataset of a recipe; prints a line before slow work."""
    task = recipe.build_task()
    data: Dataset = task.load(folder, download=download, report=say)
    for note in task.notes(data, recipe.train.batch_size):
        say(note)
    return data
