"""The record of a benchmark, and the file that holds it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from torchcram.experiments.io import json_text
from torchcram.experiments.io.dataclass_io import require
from torchcram.experiments.io.files import write_atomically
from torchcram.experiments.metrics import PERPLEXITY, is_possible, less_is_better

FILES = {"cpu": "bench.json", "cuda": "bench-cuda.json"}  # in the folder of a run, by device
DENSE = "dense"


@dataclass(frozen=True)
class ModelRecord:
    """A model that was measured: its accuracy, and the sizes of its files.

    Attributes:
        target: Operator that it was compressed by, as text, or "dense".
        sparsity: Fraction of zeros in its compressible weights.
        accuracy: Score on the test split by the metric of the task; None if unknown.
        plain_bytes: Size of a plain safetensors file.
        compact_bytes: Size of a compact file.
        onnx_bytes: Size of an ONNX file; None where there is none.
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
        for key in ("plain_bytes", "compact_bytes"):
            require(getattr(self, key) > 0, key, getattr(self, key), "a positive number")


@dataclass(frozen=True)
class Setting:
    """Batch size and number of threads of a measurement.

    Attributes:
        batch: Batch size.
        threads: Number of threads of every engine; on a GPU those of the host.
        shape: Shape of the inputs.
    """

    batch: int
    threads: int
    shape: tuple[int, ...]

    def __str__(self) -> str:
        plural = "" if self.threads == 1 else "s"
        return f"batch {self.batch}, {self.threads} thread{plural}"


@dataclass(frozen=True)
class Times:
    """Latency of a call in milliseconds: the median over the rounds, and the quartiles.

    Attributes:
        median: Median over the rounds.
        low: First quartile.
        high: Third quartile.
        rounds: Number of timed rounds.
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
    """Times of an engine with one of the models.

    Attributes:
        target: Target of the model.
        engine: Name of the engine.
        setting: Index of the setting.
        times: Times; None where the engine cannot run the model.
        error: Largest difference of its outputs from those of eager torch, as a fraction of the
            largest output.
        note: Reason why the engine cannot run the model, or another remark.
    """

    target: str
    engine: str
    setting: int
    times: Times | None
    error: float | None = None
    note: str = field(default="", metadata=json_text.UNLESS_DEFAULT)


@dataclass(frozen=True)
class GenerationTiming:
    """Times of an engine that generates text with one of the models, one sequence at a time.

    Attributes:
        target: Target of the model, or the name of a GGUF file.
        engine: Name of the engine.
        threads: Number of threads.
        prompt: Times of the prompt up to the first new token; None where the engine cannot run.
        token: Times of a token after it; None where the engine cannot run.
        perplexity: Perplexity of what the engine computes for single tokens, on the first
            `Generation.scored_tokens` tokens of the test text; None where it was not measured.
        error: Largest difference of the scores of the next token from those of eager torch in
            float32 with the same model, as a fraction of the largest score.
        note: Reason why the engine cannot run the model, or another remark.
    """

    target: str
    engine: str
    threads: int
    prompt: Times | None
    token: Times | None
    perplexity: float | None = None
    error: float | None = None
    note: str = field(default="", metadata=json_text.UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        together = (self.prompt is None) == (self.token is None)
        require(together, "token", self.token, "times where the prompt has times, null otherwise")
        possible = self.perplexity is None or is_possible(self.perplexity, PERPLEXITY)
        require(possible, "perplexity", self.perplexity, "1 or more, or null")


@dataclass(frozen=True)
class GgufFile:
    """A file that llama.cpp generates with.

    Attributes:
        name: Name of the file.
        bytes: Size of the file.
    """

    name: str
    bytes: int

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "name", self.name, "the name of a file")
        require(self.bytes > 0, "bytes", self.bytes, "a positive number")


@dataclass(frozen=True)
class Generation:
    """Generation of text: a prompt, and single tokens after it.

    Attributes:
        prompt_tokens: Number of tokens of the prompt.
        new_tokens: Number of single tokens that are timed after it.
        scored_tokens: Number of test tokens that the perplexities are of; None where none is known.
        timings: Times of every engine with every model, for every number of threads.
        files: GGUF files that llama.cpp generates with.
    """

    prompt_tokens: int
    new_tokens: int
    scored_tokens: int | None
    timings: tuple[GenerationTiming, ...]
    files: tuple[GgufFile, ...] = ()

    def __post_init__(self) -> None:
        for key in ("prompt_tokens", "new_tokens"):
            require(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        keys = [(t.target, t.engine, t.threads) for t in self.timings]
        require(len(set(keys)) == len(keys), "timings", keys, "each engine and model once")
        names = [file.name for file in self.files]
        require(len(set(names)) == len(names), "files", names, "every name once")

    @property
    def engines(self) -> list[str]:
        """Names of the engines, in the order they were asked for."""
        return list(dict.fromkeys(timing.engine for timing in self.timings))

    @property
    def threads(self) -> list[int]:
        """Numbers of threads."""
        return list(dict.fromkeys(timing.threads for timing in self.timings))

    @property
    def targets(self) -> list[str]:
        """Targets of the models, and names of the GGUF files."""
        return list(dict.fromkeys(timing.target for timing in self.timings))

    def timing(self, target: str, engine: str, threads: int) -> GenerationTiming | None:
        """Returns the timing of an engine with a model; None where there is none."""
        key = (target, engine, threads)
        return next((t for t in self.timings if (t.target, t.engine, t.threads) == key), None)

    def baseline(self, threads: int) -> GenerationTiming | None:
        """Returns the engine with the most tokens per second on the dense model."""
        ran = [
            (timing.token.median, timing)
            for timing in self.timings
            if (timing.target, timing.threads) == (DENSE, threads) and timing.token is not None
        ]
        return min(ran, key=lambda pair: pair[0])[1] if ran else None

    def ratio(self, timing: GenerationTiming) -> float | None:
        """Returns the tokens per second of an engine relative to the baseline."""
        base = self.baseline(timing.threads)
        if timing.token is None or base is None or base.token is None:
            return None
        return base.token.median / timing.token.median


@dataclass(frozen=True)
class Bench:
    """Models side by side, on one machine, in one run.

    Attributes:
        recipe: Name of the recipe that the models were trained by.
        title: Title of the recipe, which tables show.
        data: Exact name of the dataset.
        metric: Metric that `accuracy` is by.
        unit: Name of the samples in the plural: "images" or "sequences".
        device: Kind of device, "cpu" or "cuda".
        machine: Name of the machine.
        versions: Versions of the packages by name.
        settings: Batch sizes and numbers of threads.
        subjects: Models, the dense one first.
        timings: Times of every engine with every model in every setting.
        generation: Times of generation, of language models on a CPU.
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
    generation: Generation | None = field(default=None, metadata=json_text.UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        targets = [model.target for model in self.subjects]
        require(targets[:1] == [DENSE], "subjects", targets, "the dense model first")
        require(len(set(targets)) == len(targets), "subjects", targets, "every target once")
        for index, model in enumerate(self.subjects):
            possible = model.accuracy is None or is_possible(model.accuracy, self.metric)
            allowed = "1 or more" if less_is_better(self.metric) else "0 to 1"
            require(possible, f"subjects[{index}].accuracy", model.accuracy, allowed)
        seen = set()
        for timing in self.timings:
            known = timing.target in targets and 0 <= timing.setting < len(self.settings)
            key = (timing.target, timing.engine, timing.setting)
            require(known and key not in seen, "timings", key, "known ones, each once")
            seen.add(key)
        if self.generation is not None:
            known_names = [*targets, *(file.name for file in self.generation.files)]
            for generated in self.generation.targets:
                allowed = f"one of {', '.join(known_names)}"
                require(generated in known_names, "generation.timings", generated, allowed)

    @property
    def engines(self) -> list[str]:
        """Names of the engines, in the order they were asked for."""
        return list(dict.fromkeys(timing.engine for timing in self.timings))

    def timing(self, target: str, engine: str, setting: int) -> Timing | None:
        """Returns the timing of an engine with a model; None where there is none."""
        key = (target, engine, setting)
        return next((t for t in self.timings if (t.target, t.engine, t.setting) == key), None)

    def baseline(self, setting: int) -> Timing | None:
        """Returns the fastest engine on the dense model, which all are compared with."""
        return fastest(t for t in self.timings if (t.target, t.setting) == (DENSE, setting))

    def ratio(self, timing: Timing) -> float | None:
        """Returns the speed of an engine relative to the baseline."""
        base = self.baseline(timing.setting)
        if timing.times is None or base is None or base.times is None:
            return None
        return base.times.median / timing.times.median

    def per_second(self, timing: Timing) -> float | None:
        """Returns the throughput of an engine in samples per second."""
        if timing.times is None:
            return None
        return 1000 * self.settings[timing.setting].batch / timing.times.median


def fastest(timings: Iterable[Timing]) -> Timing | None:
    """Returns the timing with the smallest median; None where no engine could run."""
    ran = [(timing.times.median, timing) for timing in timings if timing.times is not None]
    return min(ran, key=lambda pair: pair[0])[1] if ran else None


def read_bench(path: Path) -> Bench:
    """Reads the file of a benchmark.

    Raises:
        ValueError: If the content is not allowed; the message names the file and the key.
        OSError: If there is no such file.
    """
    return json_text.parse(Bench, path.read_bytes(), str(path))


def write_bench(bench: Bench, path: Path) -> None:
    """Writes the file of a benchmark atomically."""
    write_atomically(path, json_text.dump(bench))
