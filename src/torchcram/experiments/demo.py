"""The demonstration: two recipes of the digits trained, compressed in one shot and benchmarked."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.bench.candidates import open_source
from torchcram.experiments.bench.record import FILES, write_bench
from torchcram.experiments.bench.run import Plan, run_bench
from torchcram.experiments.bench.timer import torch_threads
from torchcram.experiments.recipe import Recipe, load_recipe
from torchcram.experiments.recipe.overrides import with_epochs
from torchcram.experiments.results_store import load_or_measure
from torchcram.experiments.training.trainer import train

if TYPE_CHECKING:
    from torchcram.experiments.bench.record import Bench
    from torchcram.experiments.evaluation.results import Result
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.trainer import Progress

SGD = "digits/convnet-digits/sgd"
CRAM = "digits/convnet-digits/cram-plus-multi"
EPOCHS = 80
TESTS = 8  # of the test accuracy in the course of a training
PLAN = Plan(("torch", "torchcram"), batches=(64,), threads=(1,), rounds=15, onnx_size=False)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Demo:
    """Outcome of the demonstration.

    Attributes:
        runs: Folders of the runs, SGD first.
        results: Results of the runs.
        bench: Benchmark of the compressed models of CrAM+.
    """

    runs: tuple[Path, ...]
    results: tuple[Result, ...]
    bench: Bench


def run_demo(
    folder: Path,
    *,
    seed: int = 0,
    epochs: int = EPOCHS,
    progress: Callable[[str], Progress] | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Demo:
    """Trains the same network by SGD and by CrAM+, compresses both, and times those of CrAM+.

    Both start from the same weights. SGD trains for twice as many epochs, because a step of CrAM+
    takes two passes. All work is done in one thread: the network is too small for more, and the
    numbers are then the same on any number of cores. Called again, it continues where it was.

    Args:
        folder: Folder that the folders of the runs are written to.
        seed: Seed of the initial weights, the batches and the sampled operators.
        epochs: Number of epochs of CrAM+.
        progress: Function that returns, for the title of a recipe, what is called after its epochs.
        report: Function that is called with a line of text before slow work.
    """
    recipes = [
        with_epochs(load_recipe(name), count) for name, count in ((SGD, 2 * epochs), (CRAM, epochs))
    ]
    runs = tuple(folder / _name(recipe, seed) for recipe in recipes)
    with torch_threads(1):
        data: Dataset = recipes[0].build_task().load(folder, download=False, report=report)
        results = [
            _train(recipe, run, data, seed=seed, progress=progress and progress(recipe.title))
            for recipe, run in zip(recipes, runs, strict=True)
        ]
        bench = _bench(runs[-1], data, report)
    return Demo(runs, tuple(results), bench)


def _name(recipe: Recipe, seed: int) -> str:
    return f"{recipe.method_name}-{recipe.train.epochs}-epochs-seed{seed}"


def _train(
    recipe: Recipe, folder: Path, data: Dataset, *, seed: int, progress: Progress | None
) -> Result:
    interval = max(1, recipe.train.epochs // TESTS)
    trained = train(
        recipe,
        folder,
        data=data,
        seed=seed,
        device=CPU,
        eval_interval=interval,
        checkpoint_interval=interval,
        progress=progress,
    )
    return load_or_measure(folder, trained, data, device=CPU)


def _bench(run: Path, data: Dataset, report: Callable[[str], None]) -> Bench:
    source = open_source(run, ())
    candidates = source.candidates(data, device=CPU, accuracy=True, report=report)
    with tempfile.TemporaryDirectory() as folder:
        bench = run_bench(
            candidates,
            source.recipe,
            data,
            plan=PLAN,
            device=CPU,
            folder=Path(folder),
            report=report,
        )
    write_bench(bench, run / FILES["cpu"])
    return bench
