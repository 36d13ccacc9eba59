"""One-shot compression of a trained model to many targets, with scores before and after tuning.

`compressed_models` is the one place where a model is compressed, its batch-norm statistics are
estimated anew and it is tested: for tables, exports, benchmarks, fine-tuning and the target that
is watched during training.
"""

from __future__ import annotations

import copy
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchcram import compress, sparsity, tune_batchnorm_
from torchcram.experiments.evaluation.results import TargetResult, mean, std
from torchcram.experiments.io.files import slug
from torchcram.experiments.io.weights import save_model
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.recipe.build import build_batches, target_weights
from torchcram.experiments.seeds import mixed
from torchcram.experiments.tasks import autocast
from torchcram.pruners import Pruner, parse_pruner, prune_

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram import Operator
    from torchcram.experiments.recipe.schema import Recipe
    from torchcram.experiments.tasks import Batches, Score

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class CompressedModel:
    """A copy of a trained model, compressed to one target.

    Attributes:
        operator: Operator that compressed it.
        model: Compressed model; batch norm is tuned on the first calibration set.
        before: Score with the batch-norm statistics of training; None if it was not computed.
        after: Scores with the statistics of each calibration set; the score before where the task
            has no batch norm; empty if they were not computed.
        sparsity: Fraction of zeros in the weights that are compressed.
        model_sparsity: Fraction of zeros in all parameters.
        seconds: Time that a pruner took; None for operators that do not look at data.
    """

    operator: Operator
    model: nn.Module
    before: Score | None
    after: tuple[Score, ...]
    sparsity: float
    model_sparsity: float
    seconds: float | None = None

    def result(self) -> TargetResult:
        """Returns the scores as a row of a result file."""
        if self.before is None or not self.after:
            raise ValueError(f"{self.operator}: the model was not scored")
        values = [score.value for score in self.after]
        return TargetResult(
            operator=str(self.operator),
            sparsity=self.sparsity,
            model_sparsity=self.model_sparsity,
            before=self.before.value,
            after=mean(values),
            after_std=std(values),
            trials=len(self.after),
            others=self.after[-1].others,
            seconds=self.seconds,
        )


def compressed_models(
    model: nn.Module,
    recipe: Recipe,
    data: Any,  # noqa: ANN401
    targets: Sequence[str],
    *,
    device: torch.device,
    seed: int,
    trials: int = 1,
    score_before: bool = True,
    score_after: bool | Callable[[str], bool] = True,
    calibration: Any = None,  # noqa: ANN401
    test: Batches | None = None,
    ranks: Ranks = SINGLE,
) -> Iterator[CompressedModel]:
    """Yields copies of a model, each compressed to one target, tuned and scored.

    All targets see the same calibration sets. Layers that an operator leaves dense are named in
    the log.

    Args:
        model: Trained model on `device`; it stays unchanged.
        recipe: Recipe that says which weights are compressed, and how to calibrate and test.
        data: Dataset whose training split is calibrated on and whose test split is tested on.
        targets: Operators and pruners as text; no ranges.
        device: Device that everything is computed on.
        seed: Seed of the calibration sets.
        trials: Number of calibration sets; 0 leaves batch norm untuned.
        score_before: Whether to test before tuning.
        score_after: Whether to test after tuning, or a function that says so for each target.
        calibration: Dataset to calibrate on in place of `data`.
        test: Test batches in place of those that `data` gives.
        ranks: Processes that share the test; the calibration is that of rank 0.

    Raises:
        ValueError: If a target cannot be read, is a range or is repeated; before anything is
            computed.
    """
    operators = read_targets(targets)  # at once, not when the first model is asked for
    names = list(target_weights(recipe, model))
    calibration = data if calibration is None else calibration
    if not recipe.build_task().has_batchnorm:
        trials = 0

    def scored(small: nn.Module) -> Score:
        nonlocal test
        if test is None:
            test = build_batches(recipe, data, train=False, device=device, seed=seed, ranks=ranks)
        return score_model(small, recipe, data, test, device=device, ranks=ranks)

    def generate() -> Iterator[CompressedModel]:
        for operator in operators:
            small, seconds = _compress_one(
                model, operator, recipe, data=calibration, device=device, seed=seed, ranks=ranks
            )
            scores_after = score_after(str(operator)) if callable(score_after) else score_after
            before = scored(small) if score_before or (scores_after and not trials) else None
            after = [before] if before is not None and scores_after and not trials else []
            first = small  # is tuned on the first calibration set only
            for trial in range(trials):
                if trial == 1:
                    first = copy.deepcopy(small)
                tune_(small, recipe, calibration, device=device, seed=seed, trial=trial)
                ranks.broadcast_buffers_(small)
                if scores_after:
                    after.append(scored(small))
            parameters = dict(first.named_parameters())
            yield CompressedModel(
                operator=operator,
                model=first,
                before=before,
                after=tuple(after),
                sparsity=sparsity({name: parameters[name] for name in names}),
                model_sparsity=sparsity(parameters),
                seconds=seconds,
            )

    return generate()


def one_shot(
    model: nn.Module,
    recipe: Recipe,
    data: Any,  # noqa: ANN401
    targets: Sequence[str],
    *,
    device: torch.device,
    seed: int,
    trials: int = 1,
    save_to: Path | None = None,
    progress: Callable[[TargetResult], None] | None = None,
    ranks: Ranks = SINGLE,
) -> list[TargetResult]:
    """Returns the scores of a model that is compressed to each target.

    Args:
        model: Trained model on `device`; it stays unchanged.
        recipe: Recipe as `compressed_models` takes it.
        data: Dataset to calibrate and test on.
        targets: Operators and pruners as text; no ranges.
        device: Device that everything is computed on.
        seed: Seed of the calibration sets.
        trials: Number of calibration sets.
        save_to: Folder for the compressed models, tuned on the first calibration set; `global:0.9`
            becomes `global-0.9.safetensors`.
        progress: Function that is called with every target as soon as it is scored.
        ranks: Processes that share the test; rank 0 writes the files.
    """
    if trials < 1:
        raise ValueError(f"trials={trials!r}: at least 1 is allowed")
    results = []
    for small in compressed_models(
        model, recipe, data, targets, device=device, seed=seed, trials=trials, ranks=ranks
    ):
        result = small.result()
        if save_to is not None and ranks.is_first:
            save_model(small.model, save_to / f"{slug(result.operator, '+@')}.safetensors")
        if progress is not None:
            progress(result)
        results.append(result)
    return results


@torch.no_grad()
def score_model(
    model: nn.Module,
    recipe: Recipe,
    data: Any,  # noqa: ANN401
    batches: Batches,
    *,
    device: torch.device,
    ranks: Ranks = SINGLE,
) -> Score:
    """Returns the score of a model on test batches, in the precision of the recipe."""
    return recipe.build_task().score(
        model, data, batches, device=device, precision=recipe.train.precision, ranks=ranks
    )


def score_on_test(
    model: nn.Module,
    recipe: Recipe,
    data: Any,  # noqa: ANN401
    *,
    device: torch.device,
) -> Score:
    """Returns the score of a model on the test split."""
    batches = build_batches(recipe, data, train=False, device=device, seed=0)
    return score_model(model, recipe, data, batches, device=device)


def tune_(
    model: nn.Module,
    recipe: Recipe,
    data: Any,  # noqa: ANN401
    *,
    device: torch.device,
    seed: int,
    trial: int = 0,
) -> None:
    """Estimates the batch-norm statistics of a model anew, on training data.

    Tasks without batch norm leave the model unchanged.

    Args:
        model: Model on `device`.
        recipe: Recipe that says how many samples are used and how they are augmented.
        data: Dataset whose training split is used.
        device: Device that everything is computed on.
        seed: Seed of the choice of samples.
        trial: Number of the calibration set; each is another choice.
    """
    task = recipe.build_task()
    if not task.has_batchnorm:
        return
    batches = task.calibration_batches(
        data,
        recipe.compress.calibration_samples,
        batch_size=recipe.train.batch_size,
        device=device,
        seed=mixed(seed, trial),
    )
    with autocast(device, recipe.train.precision):
        tune_batchnorm_(model, batches)


def read_targets(targets: Sequence[str]) -> list[Operator]:
    """Returns the operators that targets stand for.

    Raises:
        ValueError: If a target cannot be read, is a range or is repeated.
    """
    operators: list[Operator] = []
    for text in targets:
        operator = parse_pruner(text)
        if operator.is_range:
            raise ValueError(f"target {str(operator)!r} is a range; allowed: one sparsity")
        if operator in operators:
            raise ValueError(f"target {str(operator)!r} is given twice")
        operators.append(operator)
    return operators


def looks_at_data(operator: Operator) -> bool:
    """Whether an operator is a pruner, or a chain with one in it."""
    return any(isinstance(part, Pruner) for part in operator.parts)


def _compress_one(
    model: nn.Module,
    operator: Operator,
    recipe: Recipe,
    *,
    data: Any,  # noqa: ANN401
    device: torch.device,
    seed: int,
    ranks: Ranks,
) -> tuple[nn.Module, float | None]:
    """Returns a compressed copy of a model, and the seconds that a pruner took."""
    with _warnings_to_log():
        if looks_at_data(operator):
            return pruned(model, operator, recipe, data=data, device=device, seed=seed, ranks=ranks)
        return compress(model, operator, weights=target_weights(recipe, model)), None


def pruned(
    model: nn.Module,
    operator: Operator,
    recipe: Recipe,
    *,
    data: Any,  # noqa: ANN401
    device: torch.device,
    seed: int,
    ranks: Ranks = SINGLE,
) -> tuple[nn.Module, float]:
    """Returns a copy of a model that a pruner has compressed, and the seconds that it took.

    The pruner looks at training batches of the recipe, augmented, with the loss of its task: as
    many as `gradients` says for pruners that have that option, drawn from as many epochs as it
    takes, and for the others as many as `compress.calibration_samples` needs.

    Args:
        model: Trained model on `device`; it stays unchanged.
        operator: Operator with a pruner in it.
        recipe: Recipe that the batches, the loss and the weights are taken from.
        data: Dataset whose training split the pruner looks at.
        device: Device that everything is computed on.
        seed: Seed of the choice of batches.
        ranks: Processes that get the result; rank 0 prunes.
    """
    small = copy.deepcopy(model)
    weights = target_weights(recipe, small)
    task = recipe.build_task()
    begin = time.perf_counter()

    def loss(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, labels = batch
        with autocast(device, recipe.train.precision):
            return task.loss(net(inputs), labels, recipe.train.label_smoothing)

    def prune() -> dict[str, Tensor]:
        source = build_batches(recipe, data, train=True, device=device, seed=mixed(seed, "pruning"))
        size = min(recipe.train.batch_size, len(data.train))
        few = math.ceil(recipe.compress.calibration_samples / size)
        count = max(getattr(part, "gradients", few) for part in operator.parts)
        prune_(small, operator, _FirstBatches(source, count), loss=loss, weights=weights)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return {name: weight.detach().cpu() for name, weight in weights.items()}

    values = ranks.broadcast_from_rank0(prune)
    if not ranks.is_first:
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(values[name])
    return small, time.perf_counter() - begin


class _FirstBatches:
    """The same first batches at every pass, from several epochs if one has too few.

    Args:
        batches: Batches to take them from.
        count: Number of batches.
    """

    def __init__(self, batches: Batches, count: int) -> None:
        self._batches, self._count = batches, count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left, epoch = self._count, 0
        while left:
            for batch in self._batches.epoch(epoch):
                yield batch
                left -= 1
                if not left:
                    return
            epoch += 1


@contextmanager
def _warnings_to_log() -> Iterator[None]:
    """Writes warnings to the log instead, so that a warning filter cannot turn them into errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        _log.warning("%s", warning.message)
