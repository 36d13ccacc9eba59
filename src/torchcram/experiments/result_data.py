"""What a recipe came to, as frozen dataclasses that refuse impossible values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchcram.experiments.structure import require

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # becomes part of a path


@dataclass(frozen=True)
class TargetResult:
    """A trained model compressed in one shot.

    Attributes:
        operator: what it was compressed by, as text.
        sparsity: the fraction of zeros in its compressible weights.
        model_sparsity: the same among all its parameters.
        before: its test accuracy, from 0 to 1, with the batch-norm statistics of training.
        after: the same with statistics estimated anew, the mean over the calibration sets.
        after_std: its standard deviation over them, where there are several.
        trials: how many calibration sets.
    """

    operator: str
    sparsity: float
    model_sparsity: float
    before: float
    after: float
    after_std: float | None = None
    trials: int = 1

    def __post_init__(self) -> None:
        require(bool(self.operator.strip()), "operator", self.operator, "an operator as text")
        for key in ("sparsity", "model_sparsity", "before", "after"):
            _require_fraction(key, getattr(self, key))
        if self.after_std is not None:
            _require_fraction("after_std", self.after_std)
        require(self.trials >= 1, "trials", self.trials, "at least 1")


@dataclass(frozen=True)
class SeedResult:
    """One training, and all that its model was compressed to.

    Attributes:
        seed: of the training.
        dense: the test accuracy of the model as trained, from 0 to 1.
        seconds: that the training took.
        targets: no operator twice.
        machine: where it ran.
        versions: of the packages, by name.
    """

    seed: int
    dense: float
    seconds: float
    targets: tuple[TargetResult, ...]
    machine: str
    versions: dict[str, str]

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "at least 0")
        _require_fraction("dense", self.dense)
        require(0 <= self.seconds <= 1e9, "seconds", self.seconds, "from 0 to 1e9")
        operators = [target.operator for target in self.targets]
        require(len(set(operators)) == len(operators), "targets", operators, "every operator once")


@dataclass(frozen=True)
class Result:
    """All trainings of one recipe.

    Attributes:
        task: first part of the name of the recipe.
        model: second part.
        method: third part.
        title: the method as tables call it.
        data: exact name of the data set.
        recipe: as plain data.
        seeds: at least one, in the order of their seeds, none twice.
    """

    task: str
    model: str
    method: str
    title: str
    data: str
    recipe: dict[str, Any]
    seeds: tuple[SeedResult, ...]

    def __post_init__(self) -> None:
        for key in ("task", "model", "method"):
            name = getattr(self, key)
            require(_NAME.fullmatch(name) is not None, key, name, "letters, digits and ._-")
        require(bool(self.seeds), "seeds", self.seeds, "at least one")
        seeds = [one.seed for one in self.seeds]
        require(seeds == sorted(set(seeds)), "seeds", seeds, "every seed once, in order")

    @property
    def path(self) -> Path:
        """Where the file belongs, below the folder of results."""
        return Path(self.task) / self.model / f"{self.method}.json"


def _require_fraction(key: str, given: float) -> None:
    require(0 <= given <= 1, key, given, "from 0 to 1")
