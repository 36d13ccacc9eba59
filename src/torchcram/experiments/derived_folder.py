"""What the folder of a derived run holds beside a run: the model it started from, and its origin.

start.safetensors   the compressed model
start.json          where it came from, and what it came to before training
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.build import build_initial_model
from torchcram.experiments.derived_start import Beginning, zeros_of
from torchcram.experiments.files import write_atomically
from torchcram.experiments.identity import explain_differences
from torchcram.experiments.run import Start
from torchcram.experiments.run_folder import RUN, load_model_, save_model
from torchcram.experiments.structure import build

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.recipe import Recipe

START, ORIGIN = "start.safetensors", "start.json"


@dataclass(frozen=True)
class Asked:
    """What a start depends on.

    Attributes:
        at: the operator that the model is compressed by, or "dense".
        new_head: whether its last layer is replaced.
        weights: digest of the model that is compressed.
        seed: of the new head and of the calibration.
    """

    at: str
    new_head: bool
    weights: str
    seed: int


@dataclass(frozen=True)
class Origin:
    """Where a training started.

    Attributes:
        asked: what its start depends on.
        run: folder of the run that the model is from.
        dense: test accuracy of that run, from 0 to 1.
        beginning: the model as it started.
    """

    asked: Asked
    run: str
    dense: float
    beginning: Beginning


def read_origin(folder: Path, asked: Asked | None = None) -> Origin | None:
    """Returns where the run of a folder started; None where there is none yet.

    Args:
        folder: need not be there.
        asked: what its start is to be.

    Raises:
        ValueError: if the folder is of another run, naming in what they differ.
    """
    path = folder / ORIGIN
    if not path.exists():
        if (folder / RUN).exists():
            raise ValueError(f"{folder} holds another run: it did not start from a finished one")
        return None
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    origin = build(Origin, found, str(path))
    wanted = origin.asked if asked is None else asked
    if different := explain_differences(asdict(origin.asked), asdict(wanted)):
        raise ValueError(f"{folder} holds another run: {'; '.join(different)}")
    return origin


def write_start(folder: Path, model: nn.Module, origin: Origin) -> None:
    """Writes the start of a run; it counts once its origin is there."""
    save_model(model, folder / START)
    content = json.dumps(asdict(origin), indent=2)
    write_atomically(folder / ORIGIN, f"{content}\n".encode())


def load_start(folder: Path, recipe: Recipe, *, classes: int, origin: Origin) -> Start:
    """Returns the start that `write_start` wrote, on the CPU, with the masks to hold.

    Training starts from the file, so that an interrupted one continues from the same weights
    wherever these were computed.
    """
    model = build_initial_model(recipe, classes=classes, seed=0, pretrained=False)
    load_model_(model, folder / START)
    return Start(model, zeros_of(model, origin.beginning))
