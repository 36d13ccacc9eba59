"""The folder of a run: its recipe, its log, its checkpoints and the trained model.

recipe.yaml         recipe with all keys and values
run.json            seed, data, machine, versions; once finished, accuracy and seconds
log.jsonl           one record per epoch; tensorboard/ has the same
checkpoints/        the two newest checkpoints
model.safetensors   the trained, dense model
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcram.experiments.io import json_text, yaml_text
from torchcram.experiments.io.dataclass_io import plain
from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import remove_leftovers, write_atomically
from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.training.log import LOG

if TYPE_CHECKING:
    from torchcram.experiments.tasks import Dataset

RECIPE, RUN, CHECKPOINTS, MODEL = "recipe.yaml", "run.json", "checkpoints", "model.safetensors"


@dataclass(frozen=True)
class Finished:
    """Score and time of a finished training.

    Attributes:
        accuracy: Test accuracy of the dense model, or the metric of the task, from 0 to 1.
        seconds: Time that the training took.
        processes: Number of processes that trained together, at the end.
        others: Further metrics, by name.
        epochs: Number of epochs that were trained, where early stopping decided it.
        reached: Sparsity that training itself reached, where the target was another one.
    """

    accuracy: float
    seconds: float
    processes: int = field(default=1, metadata=json_text.UNLESS_DEFAULT)
    others: dict[str, float] | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    epochs: float | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    reached: float | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)


@dataclass(frozen=True)
class DataInfo:
    """Description of a dataset that tells it from others.

    Attributes:
        name: Name of the dataset.
        train_images: Number of training images, or of sequences for texts.
        test_images: Number of test images or sequences.
        classes: Names of the classes.
        mean: Mean of the training images per channel; empty for other data.
        contents: Digest of the contents; empty for images.
    """

    name: str
    train_images: int
    test_images: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    contents: str = field(default="", metadata=json_text.UNLESS_DEFAULT)

    @classmethod
    def of(cls, data: Dataset) -> DataInfo:
        """Describes a dataset."""
        mean = tuple(round(value, 6) for value in data.mean)  # machines differ in the last digits
        return cls(data.name, len(data.train), len(data.test), data.classes, mean, data.contents)


@dataclass(frozen=True)
class RunInfo:
    """Description of a run besides its recipe, the contents of `run.json`.

    Attributes:
        seed: Seed of the initial weights, the batches and the choice of operators.
        data: Dataset that it trains and tests on.
        start: Digest of the weights and masks that it started from; None for initial weights.
        machine: Name of the machine that it runs on.
        versions: Versions of the packages, by name.
        finished: Score and time; None until the training is finished.
    """

    seed: int
    data: DataInfo
    start: str | None
    machine: str
    versions: dict[str, str]
    finished: Finished | None = None


def identity(recipe: Recipe, info: RunInfo) -> dict[str, Any]:
    """Returns everything that the weights depend on; runs with equal identities are the same.

    The title and the compressions after training are left out.
    """
    settings = recipe.to_dict()
    del settings["title"], settings["compress"]
    return {"recipe": settings, "seed": info.seed, "data": plain(info.data), "start": info.start}


def open_run(folder: Path, recipe: Recipe, info: RunInfo) -> RunInfo:
    """Makes the folder of a run, or opens it if it exists.

    Returns:
        `info`, or the description of the same run that the folder holds.

    Raises:
        ValueError: If the folder holds something else, or another run that has done an epoch; the
            message names the differences, and the folder stays unchanged.
    """
    stored = None
    if (folder / RUN).exists():
        earlier, stored = read_run(folder)
        if different := explain_differences(identity(earlier, stored), identity(recipe, info)):
            if (folder / CHECKPOINTS).exists() or (folder / MODEL).exists():
                what = f": {'; '.join(different)}"
                if earlier.name != recipe.name:  # the differences would be most of two recipes
                    what = f", of the recipe {earlier.name}"
                raise ValueError(f"{folder} holds another run{what}; choose another folder (--out)")
            stored = None  # the other run has not done any epoch
    else:
        for name in (LOG, CHECKPOINTS, MODEL):
            if (folder / name).exists():
                raise ValueError(f"{folder} is not the folder of a run: it has {name} but no {RUN}")
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    write_atomically(folder / RECIPE, yaml_text.dump(recipe.to_dict()).encode())
    if stored is None:
        write_info(folder, info)
    return stored or info


def read_run(folder: Path) -> tuple[Recipe, RunInfo]:
    """Returns the recipe and the description of a run folder.

    Raises:
        ValueError: If a file is missing or damaged; the message names it.
    """
    for name in (RUN, RECIPE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is not the folder of a run: it has no {name}")
    return load_recipe(folder / RECIPE), json_text.parse(
        RunInfo, (folder / RUN).read_bytes(), str(folder / RUN)
    )


def write_info(folder: Path, info: RunInfo) -> None:
    """Writes `run.json`."""
    write_atomically(folder / RUN, json_text.dump(info))
