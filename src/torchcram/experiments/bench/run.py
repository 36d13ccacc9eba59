"""The benchmark: every engine with every model, in every setting."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.bench.engines import UnableError, cpu_engines
from torchcram.experiments.bench.example import example_batch
from torchcram.experiments.bench.files import Files
from torchcram.experiments.bench.gpu_engines import gpu_engines
from torchcram.experiments.bench.record import Bench, Setting, Subject, Timing
from torchcram.experiments.bench.side_by_side import timings_of
from torchcram.experiments.machine import machine_name, versions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from torchcram.experiments.bench.cases import Case, Report
    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset

ROUNDS = 25
SECONDS = 60.0  # of the rounds of a setting, about, where their number is not asked for


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        engines: their names.
        batches: sizes.
        threads: counts; each goes with every batch size.
        rounds: None for 25, or fewer where they take long.
    """

    engines: tuple[str, ...]
    batches: tuple[int, ...]
    threads: tuple[int, ...]
    rounds: int | None = None

    def __post_init__(self) -> None:
        for key in ("batches", "threads"):
            given = getattr(self, key)
            if not given or min(given) < 1 or len(set(given)) < len(given):
                raise ValueError(f"{key} {list(given)}: allowed are positive numbers, each once")
        if self.rounds is not None and self.rounds < 1:
            raise ValueError(f"rounds {self.rounds}: allowed is a positive number")


def run_bench(
    cases: Iterable[Case],
    recipe: Recipe,
    data: Dataset,
    *,
    plan: Plan,
    device: torch.device,
    folder: Path,
    report: Report,
) -> Bench:
    """Measures models side by side.

    What an engine cannot run has a note instead of times.

    Args:
        cases: the models, the dense one first; not asked for before all else is known to be good.
        recipe: that they were trained by.
        data: whose test split they are run on.
        plan: what to measure.
        device: a CPU or a GPU.
        folder: for files that are needed meanwhile.
        report: called with a line before something that takes long.

    Raises:
        ValueError: if a batch is larger than the test split.
    """
    files = Files(folder)
    gpu = device.type == "cuda"
    engines = gpu_engines(plan.engines, device) if gpu else cpu_engines(plan.engines, files.onnx)
    examples = {size: example_batch(recipe, data, size) for size in plan.batches}
    settings = [
        Setting(size, threads, tuple(examples[size].shape))
        for threads in plan.threads
        for size in plan.batches
    ]
    cases = list(cases)
    timings: list[Timing] = []
    for place, setting in enumerate(settings):
        report(f"{setting}: {len(cases)} models with {len(engines)} engines, side by side")
        timings += timings_of(
            cases,
            engines,
            examples[setting.batch],
            threads=setting.threads,
            setting=place,
            rounds=plan.rounds or ROUNDS,
            seconds=None if plan.rounds else SECONDS,
        )
    return Bench(
        recipe=recipe.name,
        title=recipe.title,
        data=data.name,
        metric=recipe.metric,
        unit=recipe.build_task().unit,
        device=device.type,
        machine=machine_name(device),
        versions=_versions(),
        settings=tuple(settings),
        subjects=tuple(_subject(case, files, examples[plan.batches[0]]) for case in cases),
        timings=tuple(timings),
    )


def _subject(case: Case, files: Files, example: Tensor) -> Subject:
    size = None
    with suppress(UnableError):
        size = files.onnx(case, example).stat().st_size
    return Subject(
        target=case.target,
        sparsity=case.sparsity,
        accuracy=case.accuracy,
        plain_bytes=files.plain_bytes(case),
        compact_bytes=files.compact_bytes(case),
        onnx_bytes=size,
    )


def _versions() -> dict[str, str]:
    found = versions()
    with suppress(importlib.metadata.PackageNotFoundError):
        found["onnxruntime"] = importlib.metadata.version("onnxruntime")
    return found
