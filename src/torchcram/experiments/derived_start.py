"""Where fine-tuning and transfer start: a compressed model, kept in the folder of the new run.

start.safetensors   the compressed model
start.json          where it came from, and what it came to before training
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram import masks_of, sparsity
from torchcram.experiments.evaluation.evaluate import accuracy_on_test, require_fit, tune_
from torchcram.experiments.io import json_text
from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.io.files import write_atomically
from torchcram.experiments.models import replace_head_
from torchcram.experiments.recipe.overrides import DENSE
from torchcram.experiments.seeds import global_seed
from torchcram.experiments.training.build import build_initial_model, place
from torchcram.experiments.training.run import Start
from torchcram.experiments.training.run_folder import RUN, load_model_, save_model

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.data.images import AnyData
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
class Origin(Asked):
    """Where a training started.

    Attributes:
        run: folder of the run that the model is from.
        dense: test accuracy of that run, from 0 to 1.
        compressed: names of the weights that were compressed, a new head not among them.
        sparsity: zeros among them.
        model_sparsity: zeros among all parameters.
        before: test accuracy from 0 to 1, as compressed; None with a new head.
        after: the same after batch-norm tuning.
    """

    run: str
    dense: float
    compressed: tuple[str, ...]
    sparsity: float
    model_sparsity: float
    before: float | None
    after: float | None

    @property
    def held(self) -> bool:
        """Whether zeros are held."""
        return self.at != DENSE


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
    origin = json_text.parse(Origin, path.read_bytes(), str(path))
    wanted = {} if asked is None else asdict(asked)
    if different := explain_differences({key: getattr(origin, key) for key in wanted}, wanted):
        said = "; ".join(different)
        raise ValueError(
            f"{folder} holds another run: {said}; give this one another folder (--out)"
        )
    return origin


def write_start(
    folder: Path,
    run: Path,
    dense: float,
    *,
    asked: Asked,
    small: nn.Module,
    names: list[str],
    recipe: Recipe,
    data: AnyData,
    device: torch.device,
) -> Origin:
    """Gives a compressed model its head, tunes its batch norm, measures it and writes it.

    Args:
        folder: of the new run; the start counts once its origin is there.
        run: folder that the model is from.
        dense: test accuracy of that run.
        asked: what the start depends on.
        small: the compressed model, on the CPU.
        names: of its compressed weights.
        recipe: for training on.
        data: to calibrate and test on.
        device: of all that is computed.
    """
    if asked.new_head:
        fresh = _replace_head_(small, len(data.classes), asked.seed)
        names = [name for name in names if name not in fresh]
    small = place(small, device)
    require_fit(small, recipe, data, device=device)

    def accuracy() -> float | None:
        return None if asked.new_head else accuracy_on_test(small, recipe, data, device=device)

    before = after = accuracy()
    if asked.at != DENSE:
        tune_(small, recipe, data, device=device, seed=asked.seed)
        after = accuracy()
    weights = dict(small.named_parameters())
    origin = Origin(
        **asdict(asked),
        run=str(run),
        dense=dense,
        compressed=tuple(names),
        sparsity=sparsity({name: weights[name] for name in names}),
        model_sparsity=sparsity(weights),
        before=before,
        after=after,
    )
    save_model(small, folder / START)
    write_atomically(folder / ORIGIN, json_text.dump(origin))
    return origin


def load_start(folder: Path, recipe: Recipe, *, classes: int, origin: Origin) -> Start:
    """Returns the start that `write_start` wrote, on the CPU, with the masks to hold.

    Training starts from the file, so that an interrupted one continues from the same weights
    wherever these were computed.
    """
    model = build_initial_model(recipe, classes=classes, seed=0, pretrained=False)
    load_model_(model, folder / START)
    if not origin.held:
        return Start(model)
    weights = dict(model.named_parameters())
    return Start(model, masks_of({name: weights[name] for name in origin.compressed}))


def _replace_head_(model: nn.Module, classes: int, seed: int) -> set[str]:
    """Puts a head of the seed on a model that is on the CPU; returns what belongs to it."""
    earlier = dict(model.named_parameters())
    with global_seed(seed):
        replace_head_(model, classes)
    return {name for name, value in model.named_parameters() if value is not earlier.get(name)}
