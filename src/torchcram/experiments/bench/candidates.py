"""Models to measure side by side: out of a run folder or out of a compact file."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchcram import artifact, sparsity
from torchcram.experiments.bench.record import DENSE
from torchcram.experiments.evaluation.compressed_models import compressed_models, read_targets
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.io.cache import Report
from torchcram.experiments.metrics import is_possible
from torchcram.experiments.recipe import Recipe
from torchcram.experiments.recipe.build import build_initial_model, target_weights
from torchcram.experiments.results_store import RESULT, require_same_data
from torchcram.experiments.tasks import ACCURACY
from torchcram.experiments.training.trainer import Trained, load_trained
from torchcram.pruners import parse_pruner

if TYPE_CHECKING:
    from torch import nn

    from torchcram import Operator, Weights
    from torchcram.artifact import Manifest
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.trainer import Trained

CPU = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class Candidate:
    """A model to measure.

    Attributes:
        target: Operator as text, or "dense".
        model: Model on the CPU, in eval mode.
        operator: Operator that it was compressed by.
        weights: Weights that the operator applies to.
        accuracy: Score by the metric of its task; None where unknown.
        file_bytes: Size of the compact file that it was read from, if any.
        trained: Whether its weights are trained; otherwise it can only be timed.
    """

    target: str
    model: nn.Module
    operator: Operator | None
    weights: Weights
    accuracy: float | None
    file_bytes: int | None = None
    trained: bool = True

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in its compressible weights."""
        return sparsity(self.weights)


def candidates_of_run(
    trained: Trained,
    data: Dataset,
    targets: Sequence[str],
    *,
    device: torch.device,
    known: Mapping[str, float] | None,
    report: Report,
) -> Iterator[Candidate]:
    """Yields the dense model, and copies of it compressed in one shot with batch norm tuned.

    Args:
        trained: Finished training.
        data: Dataset that it was trained and tested on.
        targets: Operators as text.
        device: Device that compresses and tests.
        known: Accuracies that are known already, by target; None to measure no accuracy at all.
        report: Function that is called with a line of text before slow work.
    """
    recipe = trained.recipe
    dense = copy.deepcopy(trained.model).to(CPU, memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    accuracy = None if known is None else trained.finished.accuracy
    yield Candidate(DENSE, dense, None, target_weights(recipe, dense), accuracy)
    models = compressed_models(
        trained.model,
        recipe,
        data,
        targets,
        device=device,
        seed=trained.info.seed,
        score_before=False,
        score_after=lambda target: known is not None and target not in known,
    )
    for target in map(str, read_targets(targets)):
        report(f"compressing to {target}")
        if known is not None and target not in known:
            report(f"testing {target}")
        compressed = next(models)
        accuracy = None if known is None else known.get(target)
        if compressed.after:
            accuracy = compressed.after[0].value
        small = compressed.model.to(CPU, memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        weights = target_weights(recipe, small)
        yield Candidate(target, small, compressed.operator, weights, accuracy)


def known_accuracies(folder: Path, trained: Trained) -> dict[str, float]:
    """Returns accuracies by target from the result in a run folder, if it is of this training."""
    try:
        result = read_result(folder / RESULT)
    except (OSError, ValueError):
        return {}
    for seed in result.seeds:
        if (seed.seed, seed.dense) == (trained.info.seed, trained.finished.accuracy):
            return {target.operator: target.after for target in seed.targets}
    return {}


class Source(Protocol):
    """A source of models to measure."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that the models were trained by."""

    def candidates(
        self, data: Dataset, *, device: torch.device, accuracy: bool, report: Report
    ) -> Iterator[Candidate]:
        """Yields the models, the dense one first.

        Args:
            data: Dataset that they are tested on.
            device: Device that compresses and tests.
            accuracy: Whether the accuracy is measured where it is not known.
            report: Function that is called with a line of text before slow work.
        """


@dataclass(frozen=True, eq=False)
class RunSource:
    """A run folder, and the targets to compress its model to."""

    folder: Path
    recipe: Recipe
    targets: tuple[str, ...]

    def candidates(
        self, data: Dataset, *, device: torch.device, accuracy: bool, report: Report
    ) -> Iterator[Candidate]:
        """Yields the trained model, and compressed copies of it."""
        trained = load_trained(self.folder, device)
        require_same_data(trained, data)
        known = known_accuracies(self.folder, trained) if accuracy else None
        yield from candidates_of_run(
            trained, data, self.targets, device=device, known=known, report=report
        )


@dataclass(frozen=True, eq=False)
class FileSource:
    """A compact file that `torchcram export` wrote."""

    path: Path
    recipe: Recipe
    manifest: Manifest

    def candidates(
        self,
        data: Dataset,
        *,
        device: torch.device,  # noqa: ARG002  nothing is compressed or tested
        accuracy: bool,
        report: Report,  # noqa: ARG002
    ) -> Iterator[Candidate]:
        """Yields a model of the same layers with initial weights, and the one in the file.

        The dense model is only timed; the accuracies of both come from the file.
        """
        metrics = self.manifest.metadata.get("metrics", {}) if accuracy else {}
        dense, small = self._model(data), self._model(data)
        artifact.load(self.path, small)
        text = self.manifest.operator
        operator = None if text is None else parse_pruner(text)
        weights = target_weights(self.recipe, dense)
        yield Candidate(DENSE, dense, None, weights, _score(metrics, "dense"), trained=False)
        weights = target_weights(self.recipe, small)
        name, size = text or self.path.name, self.path.stat().st_size
        yield Candidate(name, small, operator, weights, _score(metrics, "after"), size)

    def _model(self, data: Dataset) -> nn.Module:
        classes = len(data.classes)
        return build_initial_model(self.recipe, classes=classes, seed=0, pretrained=False).eval()


def open_source(path: Path, targets: Sequence[str]) -> Source:
    """Returns the source at a path.

    Args:
        path: Run folder or compact file.
        targets: Targets to compress to; none for those of the recipe. A file has its own.

    Raises:
        ValueError: If the path is neither, or the targets are not allowed; the message names it.
    """
    if path.is_dir():
        from torchcram.experiments.recipe.overrides import with_targets
        from torchcram.experiments.training.run_folder import read_run

        recipe, _ = read_run(path)
        recipe = with_targets(recipe, targets) if targets else recipe
        return RunSource(path, recipe, recipe.compress.to)
    if not path.exists():
        raise ValueError(f"{path} is neither a run folder nor a compact file")
    if targets:
        raise ValueError(f"--to {targets[0]}: {path} is compressed already; give a run folder")
    manifest = artifact.read_manifest(path)
    recipe_in_file = manifest.metadata.get("recipe")
    if not isinstance(recipe_in_file, dict):
        raise ValueError(f"{path} has no recipe in it, as files of `torchcram export` have")
    return FileSource(path, Recipe.from_dict(recipe_in_file, str(path)), manifest)


def _score(metrics: Any, key: str) -> float | None:  # noqa: ANN401
    if not isinstance(metrics, dict):
        return None
    value, metric = metrics.get(key), str(metrics.get("metric", ACCURACY))
    if not isinstance(value, (int, float)) or not is_possible(value, metric):
        return None
    return float(value)
