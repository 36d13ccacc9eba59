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
from torchcram.experiments.metrics import WORST_PERPLEXITY, is_possible, less_is_better
from torchcram.experiments.tasks import ACCURACY

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")  # becomes part of a path


@dataclass(frozen=True)
class TargetResult:
    """Scores of a trained model that was compressed in one shot.

    Attributes:
        operator: Operator that it was compressed by, as text.
        sparsity: Fraction of zeros in its compressible weights.
        model_sparsity: Fraction of zeros in all its parameters.
        before: Test accuracy, or the metric of the task, before batch-norm tuning.
        after: Test accuracy after batch-norm tuning, the mean over the calibration sets.
        after_std: Standard deviation of `after` over the calibration sets, if there are several.
        trials: Number of calibration sets.
        others: Further metrics after batch-norm tuning, by name.
        seconds: Time that a pruner took; None for operators that do not look at data.
        samples: Number of training samples used for calibration, if it differs from the recipe.
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
        for key in ("sparsity", "model_sparsity"):
            _require_fraction(key, getattr(self, key))
        deviation = self.after_std
        require(deviation is None or deviation >= 0, "after_std", deviation, "at least 0")
        require(self.trials >= 1, "trials", self.trials, "at least 1")
        require((self.seconds or 0) >= 0, "seconds", self.seconds, "at least 0")
        require(self.samples is None or self.samples >= 1, "samples", self.samples, "at least 1")


@dataclass(frozen=True)
class TransferSource:
    """Model that a transfer to another task started from.

    Attributes:
        recipe: Name of the recipe that it was trained with.
        title: Title of that recipe.
        at: Operator that it was compressed by, or trained for, as text; or "dense".
        target: Name of the recipe of the other task.
        dense: Name of the recipe of the source whose dense model it is compared with.
        sparsity: Fraction of zeros after the transfer in the weights that were compressed.
        model_sparsity: Fraction of zeros after the transfer in all parameters.
    """

    recipe: str
    title: str
    at: str
    target: str
    dense: str
    sparsity: float
    model_sparsity: float

    def __post_init__(self) -> None:
        for key in ("sparsity", "model_sparsity"):
            _require_fraction(key, getattr(self, key))


@dataclass(frozen=True)
class SeedResult:
    """Scores of one training and of its model compressed to several targets.

    Attributes:
        seed: Seed of the training.
        dense: Test accuracy of the model as trained, or the metric of the task: of the dense
            model, unless a method or a transfer with masks trained a sparse one.
        seconds: Time that the training took.
        targets: Scores at every target; no operator appears twice.
        machine: Name of the machine that it ran on.
        versions: Versions of the packages, by name.
        processes: Number of processes that trained together, at the end.
        others: Further metrics of the dense model, by name.
        chosen: Settings on top of the recipe that were chosen from a grid.
        epochs: Number of epochs that were trained, where early stopping decided it.
        source: Model that a transfer started from; None for all other trainings.
        reached: Sparsity that training itself reached, where the target was another one, to which
            the end of training pruned, or brought weights back.
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
    epochs: float | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    source: TransferSource | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)
    reached: float | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        require(self.seed >= 0, "seed", self.seed, "at least 0")
        require(0 <= self.seconds <= 1e9, "seconds", self.seconds, "from 0 to 1e9")
        require(self.processes >= 1, "processes", self.processes, "at least 1")
        require(self.epochs is None or self.epochs > 0, "epochs", self.epochs, "above 0")
        if self.reached is not None:
            _require_fraction("reached", self.reached)
        operators = [target.operator for target in self.targets]
        require(len(set(operators)) == len(operators), "targets", operators, "every operator once")


@dataclass(frozen=True)
class Result:
    """Scores of all trainings with one recipe.

    Attributes:
        task: First part of the recipe's name.
        model: Second part of the recipe's name.
        method: Third part of the recipe's name.
        title: Name of the method in tables.
        data: Exact name of the dataset.
        recipe: Recipe as plain data.
        seeds: Scores of every seed, at least one, in ascending order of the seeds.
        metric: Name of the metric that other fields call accuracy; see `experiments.metrics`.
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
        seeds = [result.seed for result in self.seeds]
        require(seeds == sorted(set(seeds)), "seeds", seeds, "every seed once, in order")
        self._check_values()

    def _check_values(self) -> None:
        """Refuses values that the metric cannot have."""
        allowed = (
            f"from 1 to {WORST_PERPLEXITY:g}" if less_is_better(self.metric) else "from 0 to 1"
        )
        for number, seed in enumerate(self.seeds):
            values = {"dense": seed.dense}
            for index, target in enumerate(seed.targets):
                values[f"targets[{index}].before"] = target.before
                values[f"targets[{index}].after"] = target.after
            for key, value in values.items():
                possible = is_possible(value, self.metric)
                require(possible, f"seeds[{number}].{key}", value, allowed)

    @property
    def path(self) -> Path:
        """Path of the file within the folder of results."""
        return Path(self.task) / self.model / f"{self.method}.json"


def read_result(path: str | Path) -> Result:
    """Reads a result file.

    Raises:
        ValueError: If the file is not a result; the message names the file, the key, what was
            given and what is allowed.
        OSError: If there is no such file.
    """
    return json_text.parse(Result, Path(path).read_bytes(), str(path))


def read_results(folder: str | Path) -> list[Result]:
    """Reads every `<task>/<model>/<method>.json` below a folder, in the order of their names.

    Raises:
        ValueError: If a file is not a result, or its result belongs to another path.
    """
    folder, results = Path(folder), []
    for path in sorted(folder.glob("*/*/*.json")):
        result = read_result(path)
        if folder / result.path != path:
            raise ValueError(f"{path} holds the result that belongs in {folder / result.path}")
        results.append(result)
    return results


def write_result(result: Result, path: str | Path) -> None:
    """Writes a result file atomically."""
    write_atomically(Path(path), json_text.dump(result))


def merge_seed(result: Result | None, recipe: Recipe, seed: SeedResult) -> Result:
    """Returns a result with a seed added; it replaces an earlier result of the same seed.

    Args:
        result: Result with the earlier seeds; None begins a new one.
        recipe: Recipe that the seed was trained with. Only its title may differ from before.
        seed: Scores of the seed.

    Raises:
        ValueError: If the recipe differs from that of the earlier seeds; the message names the
            keys.
    """
    plain = recipe.to_dict()
    keys = [] if result is None else differences(result.recipe, plain)
    if keys and keys != ["title"]:
        raise ValueError(
            f"{recipe.name}: seed {seed.seed} was trained with another recipe than the earlier "
            f"seeds; they differ in {', '.join(keys)}"
        )
    earlier = () if result is None else result.seeds
    others = [other for other in earlier if other.seed != seed.seed]
    return Result(
        task=recipe.task_name,
        model=recipe.architecture,
        method=recipe.method_name,
        title=recipe.title,
        data=recipe.data.name,
        recipe=plain,
        seeds=tuple(sorted([*others, seed], key=lambda entry: entry.seed)),
        metric=recipe.metric,
    )


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return statistics.fmean(values)


def std(values: Sequence[float]) -> float | None:
    """Returns the sample standard deviation; None for a single value, which has none."""
    return statistics.stdev(values) if len(values) > 1 else None


def _require_fraction(key: str, value: float) -> None:
    require(0 <= value <= 1, key, value, "from 0 to 1")
