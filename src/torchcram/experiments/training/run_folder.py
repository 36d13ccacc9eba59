"""The folder of a run: what it is of, and the model that came out.

recipe.yaml         all keys and values
run.json            seed, data, machine, versions; once finished, accuracy and seconds
log.jsonl           a record per epoch; the same in tensorboard/
checkpoints/        the two newest
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
    """What a finished training came to.

    Attributes:
        accuracy: of the dense model on the test images, from 0 to 1; or the metric of the task.
        seconds: that it took.
        processes: how many trained together, at the end.
        others: further metrics, by name.
    """

    accuracy: float
    seconds: float
    processes: int = field(default=1, metadata=json_text.UNLESS_DEFAULT)
    others: dict[str, float] | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)


@dataclass(frozen=True)
class DataInfo:
    """What tells the data of a run from others.

    Attributes:
        name: of the data set.
        train_images: how many; of texts, the sequences.
        test_images: how many.
        classes: their names.
        mean: of the training images, per channel.
        contents: a digest of texts.
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
    """What a run is, beside its recipe.

    Attributes:
        seed: of the initial weights, the batches and the draws.
        data: that it trains and tests on.
        start: digest of the weights and masks it started from, where they were given.
        machine: it runs on.
        versions: of the packages, by name.
        finished: None until it is.
    """

    seed: int
    data: DataInfo
    start: str | None
    machine: str
    versions: dict[str, str]
    finished: Finished | None = None


def identity(recipe: Recipe, info: RunInfo) -> dict[str, Any]:
    """Returns all that the weights depend on; two runs that agree in it are the same.

    The title and the targets of the compression after training do not count.
    """
    said = recipe.to_dict()
    del said["title"], said["compress"]
    return {"recipe": said, "seed": info.seed, "data": plain(info.data), "start": info.start}


def open_run(folder: Path, recipe: Recipe, info: RunInfo) -> RunInfo:
    """Makes the folder of a run, or finds that it is there already.

    Returns:
        `info`, or what the folder says of the same run.

    Raises:
        ValueError: if it is the folder of another run that has done an epoch, naming in what they
            differ, or of something else; it stays as it is then.
    """
    found = None
    if (folder / RUN).exists():
        earlier, found = read_run(folder)
        if different := explain_differences(identity(earlier, found), identity(recipe, info)):
            if (folder / CHECKPOINTS).exists() or (folder / MODEL).exists():
                said = "; ".join(different)
                raise ValueError(
                    f"{folder} holds another run: {said}; give this one another folder (--out)"
                )
            found = None  # it did not get anywhere
    else:
        for name in (LOG, CHECKPOINTS, MODEL):
            if (folder / name).exists():
                raise ValueError(f"{folder} holds {name} but no {RUN}: it is no folder of a run")
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    write_atomically(folder / RECIPE, yaml_text.dump(recipe.to_dict()).encode())
    if found is None:
        write_info(folder, info)
    return found or info


def read_run(folder: Path) -> tuple[Recipe, RunInfo]:
    """Returns what a run folder is of.

    Raises:
        ValueError: naming the file, if there is none or it is not as it should be.
    """
    for name in (RUN, RECIPE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no folder of a run: there is no {name}")
    return load_recipe(folder / RECIPE), json_text.parse(
        RunInfo, (folder / RUN).read_bytes(), str(folder / RUN)
    )


def write_info(folder: Path, info: RunInfo) -> None:
    """Writes `run.json`."""
    write_atomically(folder / RUN, json_text.dump(info))
