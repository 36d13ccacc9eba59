"""What a benchmark found, and the file that it is kept in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torchcram.experiments.io import json_text
from torchcram.experiments.io.dataclass_io import require
from torchcram.experiments.io.files import write_atomically

FILES = {"cpu": "bench.json", "cuda": "bench-cuda.json"}  # in the folder of a run, by device
DENSE = "dense"


@dataclass(frozen=True)
class ModelRecord:
    """A model that was measured: its files, and how good it is.

    Attributes:
        target: the operator that it was compressed by, as text, or "dense".
        sparsity: the fraction of zeros in its compressible weights.
        accuracy: on the test split, by the metric of the task, from 0 to 1; None where unknown.
        plain_bytes: of a plain safetensors file.
        compact_bytes: of a compact file.
        onnx_bytes: of an ONNX file; None where there is none.
    """

    target: str
    sparsity: float
    accuracy: float | None
    plain_bytes: int
    compact_bytes: int
    onnx_bytes: int | None = None

    def __post_init__(self) -> None:
        require(bool(self.target.strip()), "target", self.target, "an operator as text, or dense")
        require(0 <= self.sparsity <= 1, "sparsity", self.sparsity, "from 0 to 1")
        known = self.accuracy is not None
        require(not known or 0 <= (self.accuracy or 0) <= 1, "accuracy", self.accuracy, "0 to 1")
        for key in ("plain_bytes", "compact_bytes"):
            require(getattr(self, key) > 0, key, getattr(self, key), "a positive number")


@dataclass(frozen=True)
class Setting:
    """What is fed, by how many threads.

    Attributes:
        batch: how many samples at a time.
        threads: of every engine; on a GPU those of the host.
        shape: of the inputs.
    """

    batch: int
    threads: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        plural = "" if self.threads == 1 else "s"
        return f"batch {self.batch}, {self.threads} thread{plural}"


@dataclass(frozen=True)
class Times:
    """How long a call takes, in milliseconds: the median over the rounds, and the quartiles.

    Attributes:
        median: half of the rounds are faster.
        low: a quarter is faster.
        high: a quarter is slower.
        rounds: how many there were.
    """

    median: float
    low: float
    high: float
    rounds: int

    def __post_init__(self) -> None:
        ordered = 0 < self.low <= self.median <= self.high
        require(ordered, "median", self.median, "above 0, between low and high")
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")


@dataclass(frozen=True)
class Timing:
    """An engine that runs one of the models.

    Attributes:
        target: of the model.
        engine: its name.
        setting: place of the setting among all.
        times: None where the engine cannot run the model.
        error: the largest difference of its outputs from those of eager torch, as a fraction of
            the largest output.
        note: why it cannot, or what else there is to say.
    """

    target: str
    engine: str
    setting: int
    times: Times | None
    error: float | None = None
    note: str = field(default="", metadata=json_text.UNLESS_DEFAULT)


@dataclass(frozen=True)
class Bench:
    """Models side by side, on one machine, in one run.

    Attributes:
        recipe: name of the recipe that they were trained by.
        title: the method as tables call it.
        data: exact name of the data set.
        metric: what is said to be accuracy elsewhere.
        unit: what a batch is of, in the plural.
        device: "cpu" or "cuda".
        machine: its name.
        versions: of the packages, by name.
        settings: batch sizes and threads.
        subjects: the models, the dense one first.
        timings: of every engine with every model in every setting.
    """

    recipe: str
    title: str
    data: str
    metric: str
    unit: str
    device: str
    machine: str
    versions: dict[str, str]
    settings: tuple[Setting, ...]
    subjects: tuple[ModelRecord, ...]
    timings: tuple[Timing, ...]

    def __post_init__(self) -> None:
        targets = [one.target for one in self.subjects]
        require(targets[:1] == [DENSE], "subjects", targets, "the dense model first")
        require(len(set(targets)) == len(targets), "subjects", targets, "every target once")
        seen = set()
        for one in self.timings:
            known = one.target in targets and 0 <= one.setting < len(self.settings)
            place = (one.target, one.engine, one.setting)
            require(known and place not in seen, "timings", place, "known ones, each once")
            seen.add(place)

    @property
    def engines(self) -> list[str]:
        """Names of the engines, in the order they were asked for."""
        return list(dict.fromkeys(one.engine for one in self.timings))

    def timing(self, target: str, engine: str, setting: int) -> Timing | None:
        """Returns what an engine came to, if it was asked."""
        wanted = (target, engine, setting)
        return next((t for t in self.timings if (t.target, t.engine, t.setting) == wanted), None)

    def baseline(self, setting: int) -> Timing | None:
        """Returns the fastest engine on the dense model; all are compared with it."""
        return fastest(t for t in self.timings if (t.target, t.setting) == (DENSE, setting))

    def ratio(self, timing: Timing) -> float | None:
        """Returns how many times as fast as the baseline an engine is."""
        base = self.baseline(timing.setting)
        if timing.times is None or base is None or base.times is None:
            return None
        return base.times.median / timing.times.median

    def per_second(self, timing: Timing) -> float | None:
        """Returns the samples that an engine takes in a second."""
        if timing.times is None:
            return None
        return 1000 * self.settings[timing.setting].batch / timing.times.median


def fastest(timings: Iterable[Timing]) -> Timing | None:
    """Returns the one of the least median; None where none could run."""
    ran = [(one.times.median, one) for one in timings if one.times is not None]
    return min(ran, key=lambda pair: pair[0])[1] if ran else None


def read_bench(path: Path) -> Bench:
    """Reads a file of a benchmark.

    Raises:
        ValueError: naming the file, the key, what was given and what is allowed.
        OSError: if there is no such file.
    """
    return json_text.parse(Bench, path.read_bytes(), str(path))


def write_bench(bench: Bench, path: Path) -> None:
    """Writes a file of a benchmark; whenever this stops, the old or the new one is there."""
    write_atomically(path, json_text.dump(bench))
