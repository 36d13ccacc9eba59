"""One-shot compression of a trained model to many targets, before and after batch-norm tuning."""

from __future__ import annotations

import logging
import statistics
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram import compress, compressible_weights, parse_operator, sparsity, tune_batchnorm_
from torchcram.experiments.build import build_batches
from torchcram.experiments.data import DataSet, PictureSet, calibration_batches
from torchcram.experiments.data.seeds import mixed
from torchcram.experiments.evaluate import evaluate
from torchcram.experiments.results import SeedResult, TargetResult
from torchcram.experiments.run_folder import RunInfo, save_model
from torchcram.experiments.step import autocast

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchcram import Operator
    from torchcram.experiments.recipe import Recipe

_log = logging.getLogger(__name__)


def one_shot(
    model: nn.Module,
    recipe: Recipe,
    data: DataSet | PictureSet,
    targets: Sequence[str],
    *,
    device: torch.device,
    seed: int,
    trials: int = 1,
    save_to: Path | None = None,
    progress: Callable[[TargetResult], None] | None = None,
) -> list[TargetResult]:
    """Compresses copies of `model`, each to one target, and measures them.

    Each is measured with the batch-norm statistics of training and then, for every calibration
    set, with statistics of that set. All targets see the same sets. Layers that an operator leaves
    as they are are named in the log.

    Args:
        model: on `device`; it stays as it is.
        recipe: its sections `compress`, `data` and `train` say what to leave dense, and how to
            calibrate and test.
        data: training images are calibrated on, test images tested on.
        targets: operators as text; no ranges.
        device: of all that is computed.
        seed: of the calibration sets.
        trials: how many calibration sets.
        save_to: a folder for the compressed models, tuned with the last set; `global:0.9` becomes
            `global-0.9.safetensors`.
        progress: told of every target as soon as it is measured.

    Raises:
        ValueError: for a target that cannot be read, is a range or comes twice, before anything is
            computed.
    """
    operators = _read_targets(targets)
    if trials < 1:
        raise ValueError(f"trials={trials!r} is not a positive number")
    measure = _Measure(model, recipe, data, device=device, seed=seed)
    results = []
    for operator in operators:
        small, result = measure.at(operator, trials)
        if save_to is not None:
            save_model(small, save_to / f"{str(operator).replace(':', '-')}.safetensors")
        if progress is not None:
            progress(result)
        results.append(result)
    return results


def seed_result(info: RunInfo, targets: Sequence[TargetResult]) -> SeedResult:
    """Returns a finished training and what its model was compressed to as one result."""
    if info.finished is None:
        raise ValueError(f"the training with seed {info.seed} is not finished")
    return SeedResult(
        seed=info.seed,
        dense=info.finished.accuracy,
        seconds=info.finished.seconds,
        targets=tuple(targets),
        machine=info.machine,
        versions=dict(info.versions),
    )


class _Measure:
    """Compresses and measures a model at one target after another."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        data: DataSet | PictureSet,
        *,
        device: torch.device,
        seed: int,
    ) -> None:
        self._model, self._recipe, self._data = model, recipe, data
        self._device, self._seed = device, seed
        self._names = compressible_weights(model, dense_ends=recipe.compress.dense_ends)
        self._test = build_batches(recipe, data, train=False, device=device, seed=seed)

    def at(self, operator: Operator, trials: int) -> tuple[nn.Module, TargetResult]:
        """Returns the compressed model and what it came to."""
        with _warnings_to_log():
            small = compress(self._model, operator, weights=self._names)
        parameters = dict(small.named_parameters())
        before = self._accuracy(small)
        after = []
        for trial in range(trials):
            self._tune_(small, trial)
            after.append(self._accuracy(small))
        return small, TargetResult(
            operator=str(operator),
            sparsity=sparsity({name: parameters[name] for name in self._names}),
            model_sparsity=sparsity(parameters),
            before=before,
            after=statistics.fmean(after),
            after_std=statistics.stdev(after) if trials > 1 else None,
            trials=trials,
        )

    def _accuracy(self, model: nn.Module) -> float:
        precision = self._recipe.train.precision
        return evaluate(model, self._test.epoch(0), self._device, precision=precision)

    def _tune_(self, model: nn.Module, trial: int) -> None:
        recipe = self._recipe
        batches = calibration_batches(
            self._data.train,
            recipe.compress.calibration_samples,
            recipe.train.batch_size,
            augment=recipe.data.augment,
            mean=self._data.mean,
            std=self._data.std,
            device=self._device,
            seed=mixed(self._seed, trial),
            image_size=recipe.data.image_size,
        )
        with autocast(self._device, recipe.train.precision):
            tune_batchnorm_(model, batches)


def _read_targets(targets: Sequence[str]) -> list[Operator]:
    operators = [parse_operator(text) for text in targets]
    for place, operator in enumerate(operators):
        if operator.is_range:
            raise ValueError(f"target {str(operator)!r} is a range; a target is one operator")
        if operator in operators[:place]:
            raise ValueError(f"target {str(operator)!r} comes twice")
    return operators


@contextmanager
def _warnings_to_log() -> Iterator[None]:
    """Puts warnings into the log, where they stop nothing."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield
    for one in found:
        _log.warning("%s", one.message)
