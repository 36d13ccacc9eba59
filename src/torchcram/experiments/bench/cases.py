"""The models that are put side by side: out of the folder of a run, or out of a compact file."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram import compress, sparsity
from torchcram.experiments.bench.record import DENSE
from torchcram.experiments.evaluation.compressed_models import (
    looks_at_data,
    pruned,
    score_on_test,
    tune_,
)
from torchcram.experiments.evaluation.results import read_result
from torchcram.experiments.recipe.build import target_weights
from torchcram.experiments.results_store import RESULT
from torchcram.pruners import parse_pruner

if TYPE_CHECKING:
    from torch import nn

    from torchcram import Operator, Weights
    from torchcram.experiments.tasks import Dataset
    from torchcram.experiments.training.trainer import Trained

CPU = torch.device("cpu")
Report = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Case:
    """A model to be measured.

    Attributes:
        target: the operator as text, or "dense".
        model: on the CPU, in eval mode.
        operator: that it was compressed by.
        weights: that the operator was for.
        accuracy: by the metric of its task; None where unknown.
        file_bytes: of the compact file that it is from, if it is.
    """

    target: str
    model: nn.Module
    operator: Operator | None
    weights: Weights
    accuracy: float | None
    file_bytes: int | None = None

    @property
    def sparsity(self) -> float:
        """The fraction of zeros in its compressible weights."""
        return sparsity(self.weights)


def read_targets(targets: Sequence[str]) -> dict[str, Operator]:
    """Returns operators by their texts.

    Raises:
        ValueError: for one that cannot be read, is a range or comes twice.
    """
    found: dict[str, Operator] = {}
    for text in targets:
        operator = parse_pruner(text)
        if operator.is_range:
            raise ValueError(f"target {text!r} is a range; a target is one operator")
        if str(operator) in found:
            raise ValueError(f"target {str(operator)!r} comes twice")
        found[str(operator)] = operator
    return found


def cases_of_run(
    trained: Trained,
    data: Dataset,
    targets: Sequence[str],
    *,
    device: torch.device,
    known: Mapping[str, float] | None,
    report: Report,
) -> Iterator[Case]:
    """Yields the dense model, and copies of it compressed in one shot, batch norm tuned.

    Args:
        trained: of the run.
        data: that it was trained and tested on.
        targets: operators as text.
        device: that compresses and tests.
        known: accuracies that need not be measured, by target; None measures nothing at all.
        report: called with a line before something that takes long.
    """
    recipe = trained.recipe
    dense = copy.deepcopy(trained.model).to(CPU, memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
    accuracy = None if known is None else trained.finished.accuracy
    yield Case(DENSE, dense, None, target_weights(recipe, dense), accuracy)
    for target, operator in read_targets(targets).items():
        report(f"compressing to {target}")
        small = one_shot_model(trained, operator, data, device=device)
        accuracy = None if known is None else known.get(target)
        if known is not None and accuracy is None:
            report(f"testing {target}")
            accuracy = score_on_test(small, recipe, data, device=device).value
        small = small.to(CPU, memory_format=torch.contiguous_format).eval()  # type: ignore[call-overload]
        yield Case(target, small, operator, target_weights(recipe, small), accuracy)


def one_shot_model(
    trained: Trained, operator: Operator, data: Dataset, *, device: torch.device
) -> nn.Module:
    """Returns a compressed copy of a trained model, as `one_shot` measures it."""
    recipe, seed = trained.recipe, trained.info.seed
    if looks_at_data(operator):
        small, _ = pruned(trained.model, operator, recipe, data=data, device=device, seed=seed)
    else:
        small = compress(trained.model, operator, weights=target_weights(recipe, trained.model))
    tune_(small, recipe, data, device=device, seed=seed)
    return small


def known_accuracies(folder: Path, trained: Trained) -> dict[str, float]:
    """Returns what the result in the folder of a run says of targets, if it is of this training."""
    try:
        result = read_result(folder / RESULT)
    except (OSError, ValueError):
        return {}
    for seed in result.seeds:
        if (seed.seed, seed.dense) == (trained.info.seed, trained.finished.accuracy):
            return {one.operator: one.after for one in seed.targets}
    return {}
