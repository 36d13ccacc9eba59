"""The benchmark: every engine with every model, in every setting."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from torchcram import artifact
from torchcram.experiments.bench.engines import (
    CPU_ENGINES,
    GPU_ENGINES,
    UnableError,
    check_engines,
    cpu_engines,
    default_cpu_engines,
    gpu_engines,
)
from torchcram.experiments.bench.generation import (
    GenerationPlan,
    Limits,
    causal_model,
    measure_generation,
)
from torchcram.experiments.bench.generators import GENERATION_ENGINES, LLAMA_CPP
from torchcram.experiments.bench.record import Bench, ModelRecord, Setting, Timing
from torchcram.experiments.bench.timer import timings_of
from torchcram.experiments.io.files import slug
from torchcram.experiments.io.weights import save_model
from torchcram.experiments.machine import machine_name, versions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from torchcram.experiments.bench.candidates import Candidate
    from torchcram.experiments.io.cache import Report
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset

ROUNDS = 25
SECONDS = 60.0  # of the rounds of a setting, about, where their number is not given


@dataclass(frozen=True)
class Plan:
    """The measurements of a benchmark.

    Attributes:
        engines: Names of the engines that run whole batches.
        batches: Batch sizes.
        threads: Numbers of threads, each combined with every batch size.
        rounds: Number of timed rounds; None for 25, or fewer where they take long.
        onnx_size: Whether the sizes of ONNX files are measured where models can be exported.
        generation: Measurements of generation on the CPU; None for none.
    """

    engines: tuple[str, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int | None = None
    onnx_size: bool = True
    generation: GenerationPlan | None = None

    def __post_init__(self) -> None:
        for key in ("batches", "threads"):
            values = getattr(self, key)
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ValueError(f"{key} {list(values)}: allowed are positive numbers, each once")
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds {self.rounds}: allowed is a positive number")
        if not self.engines and self.generation is None:
            raise ValueError("nothing to measure: no engine, and no generation")


class ChosenEngines(NamedTuple):
    """Names of the engines that run whole batches, and of those that generate, if any do."""

    forward: tuple[str, ...]
    generation: tuple[str, ...] | None


def choose_engines(
    names: Sequence[str] | None,
    device: torch.device,
    *,
    forward: bool = True,
    generation: bool = False,
    gguf: bool = False,
) -> ChosenEngines:
    """Returns the engines of a benchmark.

    Args:
        names: Names of engines, each of which may run whole batches, generate, or do both; None
            for those that are used by default.
        device: Device of the engines.
        forward: Whether whole batches are run.
        generation: Whether the models generate text, which is measured on a CPU alone.
        gguf: Whether there is a file for llama.cpp, which generates with nothing else.

    Raises:
        ValueError: If a name is unknown or appears twice, or nothing is left to measure.
    """
    on_cpu = device.type == "cpu"
    generation = generation and on_cpu
    running: tuple[str, ...] = ()
    if forward:
        running = CPU_ENGINES if on_cpu else GPU_ENGINES
    generating = GENERATION_ENGINES if generation else ()
    if names is None:
        running = default_cpu_engines() if on_cpu and forward else running
    else:
        check_engines(names, tuple(dict.fromkeys((*running, *generating))))
        running = tuple(name for name in names if name in running)
        generating = tuple(name for name in names if name in generating)
        if LLAMA_CPP in names and not gguf:
            raise ValueError(f"engine {LLAMA_CPP!r} needs a GGUF file")
    generating = tuple(name for name in generating if name != LLAMA_CPP)
    return ChosenEngines(running, generating if generation and (generating or gguf) else None)


def run_bench(
    candidates: Iterable[Candidate],
    recipe: Recipe,
    data: Dataset,
    *,
    plan: Plan,
    device: torch.device,
    folder: Path,
    report: Report,
) -> Bench:
    """Measures models side by side.

    A model that an engine cannot run has a note instead of times.

    Args:
        candidates: Models, the dense one first; iterated only after all else has been checked.
        recipe: Recipe that the models were trained by.
        data: Dataset whose test split they are run on.
        plan: Measurements to make.
        device: Device of the engines, a CPU or a GPU.
        folder: Folder for temporary files.
        report: Function that is called with a line of text before slow work.

    Raises:
        ValueError: If a batch is larger than the test split, or a text to generate is longer than
            the model takes.
    """
    files = Files(folder)
    gpu = device.type == "cuda"
    engines = gpu_engines(plan.engines, device) if gpu else cpu_engines(plan.engines, files.onnx)
    batches = plan.batches if plan.engines else ()
    examples = {size: example_batch(recipe, data, size) for size in batches}
    settings = [
        Setting(size, threads, tuple(examples[size].shape))
        for threads in plan.threads
        for size in batches
    ]
    task, candidates = recipe.build_task(), iter(candidates)
    dense = next(candidates)  # the others are compressed only if it takes the prompt
    if plan.generation is not None:
        lengths = plan.generation.lengths(causal_model(dense).positions)
        task.prompt(data, lengths.prompt)
    candidates = [dense, *candidates]
    limits = Limits(plan.rounds or ROUNDS, None if plan.rounds else SECONDS)
    timings: list[Timing] = []
    for index, setting in enumerate(settings):
        report(f"{setting}: {len(candidates)} models with {len(engines)} engines, side by side")
        timings += timings_of(
            candidates,
            engines,
            examples[setting.batch],
            threads=setting.threads,
            setting=index,
            rounds=limits.rounds,
            seconds=limits.seconds,
        )
    generation = None
    if plan.generation is not None:
        generation = measure_generation(
            candidates,
            task,
            data,
            plan=plan.generation,
            threads=plan.threads,
            limits=limits,
            report=report,
        )
    sized = plan.onnx_size and bool(batches)
    return Bench(
        recipe=recipe.name,
        title=recipe.title,
        data=data.name,
        metric=recipe.metric,
        unit=task.unit,
        device=device.type,
        machine=machine_name(device),
        versions=_versions(),
        settings=tuple(settings),
        subjects=tuple(
            _model_record(candidate, files, examples[batches[0]] if sized else None)
            for candidate in candidates
        ),
        timings=tuple(timings),
        generation=generation,
    )


def _model_record(candidate: Candidate, files: Files, example: Tensor | None) -> ModelRecord:
    size = None
    if example is not None:
        with suppress(UnableError):
            size = files.onnx(candidate, example).stat().st_size
    return ModelRecord(
        target=candidate.target,
        sparsity=candidate.sparsity,
        accuracy=candidate.accuracy,
        plain_bytes=files.plain_bytes(candidate),
        compact_bytes=files.compact_bytes(candidate),
        onnx_bytes=size,
    )


def _versions() -> dict[str, str]:
    packages = versions()
    for name in ("onnxruntime", "llama-cpp-python"):
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return packages


def example_batch(recipe: Recipe, data: Dataset, size: int) -> Tensor:
    """Returns a batch of test inputs as the model gets them, on the CPU.

    Images are the first ones of the test split. Texts are those of medium length, padded to the
    longest of them.

    Args:
        recipe: Recipe that says how inputs are read.
        data: Dataset whose test split they are from.
        size: Batch size.

    Raises:
        ValueError: If the test split is smaller than the batch.
    """
    return recipe.build_task().example(data, size)


class Files:
    """Files of models in a folder, each written once.

    Args:
        folder: Folder that the files are written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._onnx: dict[str, Path | str] = {}

    def plain_bytes(self, candidate: Candidate) -> int:
        """Returns the size of a plain safetensors file."""
        path = self._path(candidate, "plain.safetensors")
        save_model(candidate.model, path)
        return _size_and_remove(path)

    def compact_bytes(self, candidate: Candidate) -> int:
        """Returns the size of a compact file."""
        if candidate.file_bytes is not None:
            return candidate.file_bytes
        path = self._path(candidate, "compact.safetensors")
        operator = None if candidate.operator is None else str(candidate.operator)
        artifact.save(candidate.model, path, operator=operator)
        return _size_and_remove(path)

    def onnx(self, candidate: Candidate, example: Tensor) -> Path:
        """Returns the ONNX file of a model for inputs shaped as `example`, with any batch size.

        Raises:
            UnableError: If the model cannot be exported; the message is the reason.
        """
        path = self._path(candidate, f"{'x'.join(map(str, example.shape[1:]))}.onnx")
        if path.name not in self._onnx:
            self._onnx[path.name] = self._export(candidate, example, path)
        exported = self._onnx[path.name]
        if isinstance(exported, str):
            raise UnableError(exported)
        return exported

    def _export(self, candidate: Candidate, example: Tensor, path: Path) -> Path | str:
        """Returns the file, or the reason why there is none."""
        try:
            from torchcram.runtime.onnx import export_onnx

            export_onnx(
                candidate.model,
                path,
                (example,),
                operator=candidate.operator,
                weights=candidate.weights,
            )
        except ImportError as error:
            return f'{error.name} is missing: pip install "torchcram[export]"'
        except ValueError as error:
            return str(error).splitlines()[0]
        return path

    def _path(self, candidate: Candidate, kind: str) -> Path:
        return self._folder / f"{slug(candidate.target, '+')}.{kind}"


def _size_and_remove(path: Path) -> int:
    size = path.stat().st_size
    path.unlink()
    return size
