"""What a benchmark is of: the folder of a run, or a compact file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from torchcram import artifact
from torchcram.experiments.bench.cases import Case, Report, cases_of_run, known_accuracies
from torchcram.experiments.bench.record import DENSE
from torchcram.experiments.io.dataclass_io import plain
from torchcram.experiments.io.dict_diff import explain_differences
from torchcram.experiments.recipe import Recipe
from torchcram.experiments.recipe.build import build_initial_model, target_weights
from torchcram.experiments.training.run_folder import DataInfo
from torchcram.experiments.training.trainer import Trained, load_trained
from torchcram.pruners import parse_pruner

if TYPE_CHECKING:
    from torch import nn

    from torchcram.artifact import Manifest
    from torchcram.experiments.tasks import Dataset


class Source(Protocol):
    """Where models come from."""

    @property
    def recipe(self) -> Recipe:
        """That the models were trained by."""

    def cases(
        self, data: Dataset, *, device: torch.device, accuracy: bool, report: Report
    ) -> Iterator[Case]:
        """Yields the models, the dense one first.

        Args:
            data: that they are tested on.
            device: that compresses and tests.
            accuracy: whether it is to be known.
            report: called with a line before something that takes long.
        """


@dataclass(frozen=True, eq=False)
class RunSource:
    """The folder of a run, and what to compress its model to."""

    folder: Path
    recipe: Recipe
    targets: tuple[str, ...]

    def cases(
        self, data: Dataset, *, device: torch.device, accuracy: bool, report: Report
    ) -> Iterator[Case]:
        """Yields the trained model, and compressed copies of it."""
        trained = load_trained(self.folder, device)
        _require_data(trained, data)
        known = known_accuracies(self.folder, trained) if accuracy else None
        yield from cases_of_run(
            trained, data, self.targets, device=device, known=known, report=report
        )


@dataclass(frozen=True, eq=False)
class FileSource:
    """A compact file that `torchcram export` wrote."""

    path: Path
    recipe: Recipe
    manifest: Manifest

    def cases(
        self,
        data: Dataset,
        *,
        device: torch.device,  # noqa: ARG002  nothing is compressed or tested
        accuracy: bool,
        report: Report,  # noqa: ARG002
    ) -> Iterator[Case]:
        """Yields a model of the same layers with initial weights, and the one in the file.

        The dense one is there to be timed; how good it was, and the other is, the file says.
        """
        metrics = self.manifest.metadata.get("metrics", {}) if accuracy else {}
        dense, small = self._model(data), self._model(data)
        artifact.load(self.path, small)
        text = self.manifest.operator
        operator = None if text is None else parse_pruner(text)
        weights = target_weights(self.recipe, dense)
        yield Case(DENSE, dense, None, weights, _fraction(metrics, "dense"))
        weights = target_weights(self.recipe, small)
        name, size = text or self.path.name, self.path.stat().st_size
        yield Case(name, small, operator, weights, _fraction(metrics, "after"), size)

    def _model(self, data: Dataset) -> nn.Module:
        classes = len(data.classes)
        return build_initial_model(self.recipe, classes=classes, seed=0, pretrained=False).eval()


def open_source(path: Path, targets: Sequence[str]) -> Source:
    """Returns the source that a path is.

    Args:
        path: a folder or a file.
        targets: to compress to; none for those of the recipe. A file has its own.

    Raises:
        ValueError: naming the path, if it is neither, or the targets are not allowed.
    """
    if path.is_dir():
        from torchcram.experiments.recipe.overrides import with_targets
        from torchcram.experiments.training.run_folder import read_run

        recipe, _ = read_run(path)
        recipe = with_targets(recipe, targets) if targets else recipe
        return RunSource(path, recipe, recipe.compress.to)
    if not path.exists():
        raise ValueError(f"{path} is neither the folder of a run nor a compact file")
    if targets:
        raise ValueError(f"--to {targets[0]}: {path} is compressed already; give a run folder")
    manifest = artifact.read_manifest(path)
    recipe_in_file = manifest.metadata.get("recipe")
    if not isinstance(recipe_in_file, dict):
        raise ValueError(f"{path} does not say what recipe it is of, as `torchcram export` does")
    return FileSource(path, Recipe.from_dict(recipe_in_file, str(path)), manifest)


def _require_data(trained: Trained, data: Dataset) -> None:
    info = trained.info
    if different := explain_differences(plain(info.data), plain(DataInfo.of(data))):
        raise ValueError(f"{info.data.name}: the run is of other data: {'; '.join(different)}")


def _fraction(metrics: Any, key: str) -> float | None:  # noqa: ANN401
    value = metrics.get(key) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, (int, float)) and 0 <= value <= 1 else None
