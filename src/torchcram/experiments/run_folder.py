"""The folder of a run: what it is of, and the model that came out.

recipe.yaml         all keys and values
run.json            seed, data, machine, versions; once finished, accuracy and seconds
log.jsonl           a record per epoch; the same in tensorboard/
checkpoints/        the two newest
model.safetensors   the trained, dense model
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram.experiments import yaml_text
from torchcram.experiments.files import remove_leftovers, write_atomically
from torchcram.experiments.identity import explain_differences
from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.runlog import LOG, TENSORBOARD
from torchcram.experiments.structure import build

if TYPE_CHECKING:
    from torch import Tensor, nn

RECIPE, RUN, CHECKPOINTS, MODEL = "recipe.yaml", "run.json", "checkpoints", "model.safetensors"


@dataclass(frozen=True)
class Finished:
    """What a finished training came to: its dense test accuracy, from 0 to 1, and seconds."""

    accuracy: float
    seconds: float


@dataclass(frozen=True)
class RunInfo:
    """What a run is, beside its recipe.

    Attributes:
        seed: of the initial weights, the batches and the draws.
        data: name of the data set.
        train_images: how many.
        test_images: how many.
        classes: their names.
        start: digest of the weights and masks it started from, where they were given.
        machine: it runs on.
        finished: None until it is.
        versions: of the packages, by name.
    """

    seed: int
    data: str
    train_images: int
    test_images: int
    classes: tuple[str, ...]
    start: str | None
    machine: str
    finished: Finished | None = None
    versions: dict[str, str] = field(default_factory=dict)


def identity(recipe: Recipe, info: RunInfo) -> dict[str, Any]:
    """Returns all that the weights depend on; two runs that agree in it are the same.

    The title and the targets of the compression after training do not count.
    """
    said = recipe.to_dict()
    return {
        "recipe": {key: said[key] for key in said if key not in ("title", "compress")},
        "seed": info.seed,
        "data": {
            "name": info.data,
            "train_images": info.train_images,
            "test_images": info.test_images,
            "classes": list(info.classes),
        },
        "start": info.start,
    }


def open_run(folder: Path, recipe: Recipe, info: RunInfo) -> RunInfo:
    """Makes the folder of a run, or finds that it is there already.

    Returns:
        `info`, or what the folder says of the same run.

    Raises:
        ValueError: if it is the folder of another run, naming in what they differ, or of something
            else; it stays as it is then.
    """
    found = None
    if (folder / RUN).exists():
        earlier, found = read_run(folder)
        if different := explain_differences(identity(earlier, found), identity(recipe, info)):
            raise ValueError(f"{folder} holds another run: {'; '.join(different)}")
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


def clear_run(folder: Path) -> None:
    """Removes the files of a run, so that it begins anew; anything else stays."""
    for name in (RUN, RECIPE, LOG, MODEL):  # without the first it is no run any more
        (folder / name).unlink(missing_ok=True)
    for name in (CHECKPOINTS, TENSORBOARD):
        if (folder / name).exists():
            shutil.rmtree(folder / name)


def read_run(folder: Path) -> tuple[Recipe, RunInfo]:
    """Returns what a run folder is of.

    Raises:
        ValueError: naming the file, if there is none or it is not as it should be.
    """
    for name in (RUN, RECIPE):
        if not (folder / name).is_file():
            raise ValueError(f"{folder} is no folder of a run: there is no {name}")
    return load_recipe(folder / RECIPE), _read_info(folder / RUN)


def _read_info(path: Path) -> RunInfo:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    versions = found.pop("versions", None) if isinstance(found, dict) else None
    info = build(RunInfo, found, str(path))
    if not isinstance(versions, dict) or not all(isinstance(v, str) for v in versions.values()):
        raise ValueError(f"{path}: versions is {versions!r}; allowed: texts by name of the package")
    return replace(info, versions=versions)


def write_info(folder: Path, info: RunInfo) -> None:
    """Writes `run.json`."""
    write_atomically(folder / RUN, (json.dumps(asdict(info), indent=2) + "\n").encode())


def save_model(model: nn.Module, path: Path) -> None:
    """Writes the weights and buffers of a model as safetensors, whole or not at all."""
    from safetensors.torch import save

    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
    }
    write_atomically(path, save(tensors, {"format": "pt"}))


def load_model_(model: nn.Module, path: Path) -> None:
    """Reads into `model` what `save_model` wrote.

    Raises:
        ValueError: naming the file, if it is not whole or of another model.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        model.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} is not the model that it should be: {error}") from error


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns a short text that differs for tensors of other names, types, shapes or values."""
    seen = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        seen.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        seen.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return seen.hexdigest()[:16]
