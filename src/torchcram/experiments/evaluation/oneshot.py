"""One-shot compression of a trained model to many targets, before and after batch-norm tuning."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram import compress, sparsity
from torchcram.experiments.data.text.datasets import TextSet
from torchcram.experiments.evaluation.evaluate import score, tune_
from torchcram.experiments.evaluation.pruning import looks_at_data, pruned
from torchcram.experiments.evaluation.results import TargetResult, mean, std
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.score import Score
from torchcram.experiments.training.build import build_batches, target_weights
from torchcram.experiments.training.data_parallel import take_statistics_
from torchcram.experiments.training.run_folder import save_model
from torchcram.pruners import parse_pruner

if TYPE_CHECKING:
    import torch
    from torch import nn

    from torchcram import Operator
    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe

_log = logging.getLogger(__name__)


def one_shot(
    model: nn.Module,
    recipe: Recipe,
    data: AnyData,
    targets: Sequence[str],
    *,
    device: torch.device,
    seed: int,
    trials: int = 1,
    save_to: Path | None = None,
    use: Callable[[TargetResult, nn.Module], None] | None = None,
    progress: Callable[[TargetResult], None] | None = None,
    ranks: Ranks = SINGLE,
) -> list[TargetResult]:
    """Compresses copies of `model`, each to one target, and measures them.

    Each is measured with the batch-norm statistics of training and then, for every calibration
    set, with statistics of that set. All targets see the same sets. Layers that an operator leaves
    as they are are named in the log.

    Args:
        model: on `device`; it stays as it is.
        recipe: its sections `compress`, `data` and `train` say what to leave dense, and how to
            calibrate and test.
        data: training images or texts are calibrated on, the others tested on.
        targets: operators as text, pruners too; no ranges.
        device: of all that is computed.
        seed: of the calibration sets.
        trials: how many calibration sets; texts need none.
        save_to: Folder for the compressed models, tuned on the first calibration set; `global:0.9`
            becomes `global-0.9.safetensors`.
        use: Function that is called with every target and its compressed model, tuned on the first
            calibration set, in the first process.
        progress: told of every target as soon as it is measured.
        ranks: Processes that share the work; rank 0 writes the files.

    Raises:
        ValueError: for a target that cannot be read, is a range or comes twice, before anything is
            computed.
    """
    operators = _read_targets(targets)
    if trials < 1:
        raise ValueError(f"trials={trials!r} is not a positive number")
    untuned = isinstance(data, TextSet)  # no statistics to tune
    names = target_weights(recipe, model)
    test = build_batches(recipe, data, train=False, device=device, seed=seed, ranks=ranks)

    def tested() -> Score:
        precision = recipe.train.precision
        return score(small, data, test, device=device, precision=precision, ranks=ranks)

    results = []
    for operator in operators:
        seconds = None
        with _warnings_to_log():
            if looks_at_data(operator):
                small, seconds = pruned(
                    model, operator, recipe, data=data, device=device, seed=seed, ranks=ranks
                )
            else:
                small = compress(model, operator, weights=names)
        parameters = dict(small.named_parameters())
        before = tested()
        after = [before] if untuned else []
        first = small  # of which no calibration set but the first is seen
        for trial in range(0 if untuned else trials):
            if trial == 1 and ranks.is_first and (save_to or use):
                first = copy.deepcopy(small)
            tune_(small, recipe, data, device=device, seed=seed, trial=trial)
            take_statistics_(small, ranks)
            after.append(tested())
        values = [one.value for one in after]
        result = TargetResult(
            operator=str(operator),
            sparsity=sparsity({name: parameters[name] for name in names}),
            model_sparsity=sparsity(parameters),
            before=before.value,
            after=mean(values),
            after_std=std(values),
            trials=len(after),
            others=after[-1].others,
            seconds=seconds,
        )
        if save_to is not None and ranks.is_first:
            save_model(first, save_to / f"{str(operator).replace(':', '-')}.safetensors")
        if use is not None and ranks.is_first:
            use(result, first)
        if progress is not None:
            progress(result)
        results.append(result)
    return results


def _read_targets(targets: Sequence[str]) -> list[Operator]:
    operators = [parse_pruner(text) for text in targets]
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
