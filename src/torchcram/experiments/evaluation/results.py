"""Result files: one JSON file per recipe with one entry per seed."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcram.experiments.io import json_text
from torchcram.experiments.io.dataclass_io import require
from torchcram.experiments.io.dict_diff import differences
from torchcram.experiments.io.files import write_atomically
from torchcram.experiments.tasks import ACCURACY

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe

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
        others: further metrics, by name; as `after`.
        seconds: that a pruner took, which looks at data.
        samples: training samples it was calibrated on, where that is not what the recipe says.
    """

    operator: str
    sparsity: float
    model_sparsity: float
    before: float
    after: float
    after_std: float | None = None
    trials: int = 1
    others: dict[str, float] | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    seconds: float | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    samples: int | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        require(bool(self.operator.strip()), "operator", self.operator, "an operator as text")
        for key in ("sparsity", "model_sparsity", "before", "after"):
            _require_fraction(key, getattr(self, key))
        if self.after_std is not None:
            _require_fraction("after_std", self.after_std)
        require(self.trials >= 1, "trials", self.trials, "at least 1")
        require((self.seconds or 0) >= 0, "seconds", self.seconds, "at least 0")
        require(self.samples is None or self.samples >= 1, "samples", self.samples, "at least 1")


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
        processes: how many trained it together, at the end.
        others: further metrics of the model as trained, by name.
        chosen: settings out of a grid that it was trained with, on top of the recipe.
    """

    seed: int
    dense: float
    seconds: float
    targets: tuple[TargetResult, ...]
    machine: str
    versions: dict[str, str]
    processes: int = field(default=1, metadata=json_text.UNLESS_DEFAULT)
    others: dict[str, float] | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    chosen: tuple[str, ...] = field(default=(), metadata=json_text.UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "at least 0")
        _require_fraction("dense", self.dense)
        require(0 <= self.seconds <= 1e9, "seconds", self.seconds, "from 0 to 1e9")
        require(self.processes >= 1, "processes", self.processes, "at least 1")
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
        metric: what is said to be accuracy elsewhere, from 0 to 1; the more the better.
    """

    task: str
    model: str
    method: str
    title: str
    data: str
    recipe: dict[str, Any]
    seeds: tuple[SeedResult, ...]
    metric: str = field(default=ACCURACY, metadata=json_text.UNLESS_DEFAULT)

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


def read_result(path: str | Path) -> Result:
    """Reads a result file.

    Raises:
        ValueError: naming the file, the key, what was given and what is allowed.
        OSError: if there is no such file.
    """
    return json_text.parse(Result, Path(path).read_bytes(), str(path))


def read_results(folder: str | Path) -> list[Result]:
    """Reads every `<task>/<model>/<method>.json` below a folder, in the order of their names.

    Raises:
        ValueError: for a file that is no result, or that holds the one of another name.
    """
    folder, results = Path(folder), []
    for path in sorted(folder.glob("*/*/*.json")):
        result = read_result(path)
        if folder / result.path != path:
            raise ValueError(f"{path} holds the result that belongs into {folder / result.path}")
        results.append(result)
    return results


def write_result(result: Result, path: str | Path) -> None:
    """Writes a result file; whenever this stops, the old or the new one is there as a whole."""
    write_atomically(Path(path), json_text.dump(result))


def merge_seed(result: Result | None, recipe: Recipe, seed: SeedResult) -> Result:
    """Adds a seed to a result, in place of an earlier one of the same number.

    Args:
        result: of earlier seeds; None begins a new one.
        recipe: by which the seed was trained. Its title may have changed, nothing else.
        seed: what came out.

    Raises:
        ValueError: naming the keys in which the recipe differs from that of the earlier seeds.
    """
    plain = recipe.to_dict()
    keys = [] if result is None else differences(result.recipe, plain)
    if keys and keys != ["title"]:
        raise ValueError(
            f"{recipe.name}: seed {seed.seed} was trained by another recipe than the earlier "
            f"seeds; they differ in {', '.join(keys)}"
        )
    earlier = () if result is None else result.seeds
    others = [one for one in earlier if one.seed != seed.seed]
    return Result(
        task=recipe.task_name,
        model=recipe.architecture,
        method=recipe.method,
        title=recipe.title,
        data=recipe.data.name,
        recipe=plain,
        seeds=tuple(sorted([*others, seed], key=lambda one: one.seed)),
        metric=recipe.metric,
    )


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return statistics.fmean(values)


def std(values: Sequence[float]) -> float | None:
    """Returns the standard deviation of a sample; None for one value, which has none."""
    return statistics.stdev(values) if len(values) > 1 else None


def _require_fraction(key: str, given: float) -> None:
    require(0 <= given <= 1, key, given, "from 0 to 1")
