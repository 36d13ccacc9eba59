"""Results over their seeds: means, spreads, order of the targets, names of the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchcram import NM, Chain, GlobalTopK, Quantize, UniformTopK, parse_operator
from torchcram.experiments.evaluation.results import (
    Result,
    TargetResult,
    TransferSource,
    mean,
    std,
)
from torchcram.experiments.io.dict_diff import flat
from torchcram.experiments.metrics import change_from, less_is_better
from torchcram.experiments.recipe import training_passes
from torchcram.experiments.recipe.overrides import DENSE
from torchcram.experiments.tasks import ACCURACY
from torchcram.pruners import Obs, Pruner, SparseGPT, Wanda, parse_pruner

PASSES = "passes: forward and backward over the training set"
DIGITS = 2  # of percentages: enough to show one test image in ten thousand
NOTICEABLE = 0.05  # tables set a larger loss of accuracy in bold red
_KINDS = (GlobalTopK, UniformTopK, NM, Quantize, Chain)  # in the order of tables
_PRUNERS = (Obs, Wanda, SparseGPT)  # after the operators, each in the order of its patterns


@dataclass(frozen=True)
class MeanStd:
    """A mean and, where there is more than one value, their standard deviation.

    Attributes:
        mean: Mean of the values.
        std: Standard deviation of the values; None for a single one.
        metric: Name of the metric that the values are of.
    """

    mean: float
    std: float | None = None
    metric: str = ACCURACY

    def __str__(self) -> str:
        deviation = "" if self.std is None else f" ± {score_text(self.std, self.metric)}"
        return score_text(self.mean, self.metric) + deviation


@dataclass(frozen=True)
class TargetSummary:
    """A target over the seeds.

    Attributes:
        operator: Operator of the target, as text.
        sparsity: Mean fraction of zeros in the compressible weights.
        model_sparsity: Mean fraction of zeros in all parameters.
        before: Accuracy as compressed.
        after: Accuracy after batch-norm tuning. Its spread is that of the seeds, and with one seed
            that of the calibration sets.
        change: Difference of `after` from the accuracy of the same model dense; of perplexities
            the ratio.
    """

    operator: str
    sparsity: float
    model_sparsity: float
    before: MeanStd
    after: MeanStd
    change: MeanStd


def percent(fraction: float) -> str:
    """Formats a fraction in percent: 0.98765 as 98.77."""
    return f"{100 * fraction:.{DIGITS}f}"


def points(change: float) -> str:
    """Formats a change of accuracy as signed percentage points: -1.23, +0.30, 0.00."""
    rounded = round(100 * change, DIGITS)
    return f"{rounded:+.{DIGITS}f}" if rounded else f"{0:.{DIGITS}f}"


def score_text(value: float, metric: str) -> str:
    """Formats a value of a metric: a fraction in percent, a perplexity as 18.42 or 76,752."""
    if not less_is_better(metric):
        return percent(value)
    if value >= 1e6:
        return f"{value:.2g}"
    return f"{value:,.{DIGITS if value < 100 else 1 if value < 1000 else 0}f}"


def change_text(change: float, metric: str) -> str:
    """Formats a change from dense: percentage points as -1.23, a ratio as 1.05x."""
    return f"{score_text(change, metric)}x" if less_is_better(metric) else points(change)


def on_axis(value: float, metric: str) -> float:
    """Returns a value or a change as charts show it: in percent, perplexities by log10."""
    return math.log10(value) if less_is_better(metric) else 100 * value


def std_on_axis(value: MeanStd) -> float:
    """Returns a standard deviation as charts show it; see `on_axis`."""
    if value.std is None:
        return 0
    if less_is_better(value.metric):
        return value.std / value.mean / math.log(10)
    return 100 * value.std


def axis_label(metric: str, what: str = "") -> str:
    """Returns the label of an axis with a metric: "test accuracy, %", "test perplexity, log10"."""
    return f"test {metric}{what}, {'log10' if less_is_better(metric) else '%'}"


def percent_sign(metric: str) -> str:
    """Returns " %" for metrics that are shown in percent, and nothing for others."""
    return "" if less_is_better(metric) else " %"


def in_percent(metric: str) -> str:
    """Returns the name of a metric with its unit: "accuracy in %", "perplexity"."""
    return metric if less_is_better(metric) else f"{metric} in %"


def is_noticeable_loss(change: float, metric: str) -> bool:
    """Returns whether a change from dense is a loss that tables set in bold red."""
    if less_is_better(metric):
        return change > 1 + NOTICEABLE
    return change < -NOTICEABLE


def counted(count: int, thing: str) -> str:
    """Returns "1 epoch", "2 epochs"."""
    return f"{count} {thing}{'s' * (count != 1)}"


def duration(seconds: float) -> str:
    """Returns "45 s", "2.5 min"."""
    return f"{seconds:.0f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def spread(values: Sequence[float], metric: str = ACCURACY) -> MeanStd:
    """Returns the mean and the standard deviation."""
    return MeanStd(mean(values), std(values), metric)


def dense(result: Result) -> MeanStd:
    """Returns the accuracy of the uncompressed models."""
    return spread([seed.dense for seed in result.seeds], result.metric)


def trained_for(result: Result) -> str | None:
    """Returns the target that a model was trained sparse for; None for dense models.

    A method trains sparse models, and so does a transfer that holds masks.
    """
    source = transferred_from(result)
    if source is not None:
        return None if source.at == DENSE else source.at
    method = result.recipe.get("method")
    if not isinstance(method, Mapping) or "target" not in method:
        return None
    target = str(method["target"])
    return None if sparsity(target) == 0 else target  # a method may train for all targets


def trained_score(result: Result) -> MeanStd:
    """Returns the score of models that were trained sparse, at their target.

    It is that after batch-norm tuning, as for all compressed models, where that was measured: the
    last selection of a method may change the activations.
    """
    row = summaries(result).get(trained_for(result) or "")
    if row is None:
        return dense(result)
    # over seeds alone, not over calibration sets
    return row.after if len(result.seeds) > 1 else spread([row.after.mean], result.metric)


def transferred_from(result: Result) -> TransferSource | None:
    """Returns the model that a transfer started from; None for all other trainings."""
    return result.seeds[0].source


def sparsity(target: str) -> float | None:
    """Returns the sparsity of an operator as text, if it has one."""
    try:
        level = getattr(parse_operator(target), "sparsity", None)
    except ValueError:
        return None
    return level if isinstance(level, float) else None


def summaries(result: Result) -> dict[str, TargetSummary]:
    """Returns all targets of a result by their operators, in the order of `sort_operators`."""
    measured: dict[str, list[tuple[float, TargetResult]]] = {}
    for seed in result.seeds:
        for target in seed.targets:
            measured.setdefault(target.operator, []).append((seed.dense, target))
    return {
        operator: _summary(measured[operator], result.metric)
        for operator in sort_operators(measured)
    }


def sort_operators(operators: Iterable[str]) -> list[str]:
    """Returns operators without repetitions, grouped by kind, their sparsities in order."""
    return sorted(dict.fromkeys(operators), key=_sort_key)


def is_operator(text: str) -> bool:
    """Returns whether a text is that of an operator or a pruner."""
    try:
        parse_pruner(text)
    except ValueError:
        return False
    return True


def global_sparsity(operator: str) -> bool:
    """Returns whether an operator prunes by magnitude over the whole model, and nothing else."""
    try:
        return isinstance(parse_operator(operator), GlobalTopK)
    except ValueError:
        return False


def on_the_axis(result: Result, operator: str) -> bool:
    """Returns whether a target is comparable with others by its sparsity alone."""
    if tuned(result):
        return global_sparsity(operator)
    try:
        return isinstance(parse_operator(operator), (GlobalTopK, UniformTopK))
    except ValueError:
        return False


@dataclass(frozen=True)
class Cost:
    """Cost of a training, the mean over the seeds.

    Attributes:
        epochs: Number of epochs.
        passes: Number of forward and backward passes over the training set.
        at_most: Whether early stopping may have ended it earlier, which older files do not say.
    """

    epochs: float
    passes: float
    at_most: bool = False


def cost(results: Sequence[Result]) -> Cost | None:
    """Returns the mean cost of trainings; None if a recipe does not say its epochs.

    Args:
        results: Results, at least one: of one recipe, or of fine-tuning at several targets.
    """
    costs = [_cost(result, seed.epochs) for result in results for seed in result.seeds]
    known = [each for each in costs if each is not None]
    if len(known) < len(costs):
        return None
    return Cost(
        mean([each.epochs for each in known]),
        mean([each.passes for each in known]),
        any(each.at_most for each in known),
    )


def _cost(result: Result, trained: float | None) -> Cost | None:
    """Returns the cost of one seed, which was trained for all epochs where `trained` is None."""
    settings = result.recipe.get("train")
    epochs = settings.get("epochs") if isinstance(settings, Mapping) else None
    if not isinstance(epochs, int) or not isinstance(settings, Mapping):
        return None
    length = epochs if trained is None else trained
    at_most = settings.get("early_stopping") is not None and trained is None
    return Cost(length, training_passes(result.recipe, length), at_most)


def epochs(result: Result, tuned: Sequence[Result] = ()) -> str:
    """Returns the epochs of a training as text, or nothing where they are not known.

    Args:
        result: Result of the training.
        tuned: Results of fine-tuning after it, whose epochs follow after a plus: "200 + 20".
    """
    return _joined([cost([result]), *([cost(tuned)] if tuned else [])], "epochs")


def passes(result: Result, tuned: Sequence[Result] = ()) -> str:
    """Returns the passes over the training set as text; the arguments are those of `epochs`."""
    return _joined([cost([result]), *([cost(tuned)] if tuned else [])], "passes")


def cost_words(result: Result) -> list[str]:
    """Returns "20 epochs" and "40 passes", or nothing where they are not known."""
    counts = {"epoch": epochs(result), "pass": passes(result)}
    plural = {"epoch": "epochs", "pass": "passes"}
    known = {unit: count for unit, count in counts.items() if count}
    return [f"{count} {unit if count == '1' else plural[unit]}" for unit, count in known.items()]


def _joined(costs: Sequence[Cost | None], what: str) -> str:
    if None in costs:
        return ""
    values = [(getattr(each, what), each.at_most) for each in costs if each is not None]
    return " + ".join("≤ " * at_most + number(value) for value, at_most in values)


def number(value: float) -> str:
    """Formats a number with up to two digits after the point: 400, 5.7, 0.45."""
    return str(rounded(value))


def rounded(value: float) -> int | float:
    """Returns a number rounded to two digits after the point, as an integer where it is one."""
    short = round(value, 2)
    return int(short) if short == int(short) else short


def reached(result: Result) -> str:
    """Returns the sparsities that training itself reached, where they were not the target's."""
    sparsities = [seed.reached for seed in result.seeds if seed.reached is not None]
    return ", ".join(f"{100 * sparsity:.1f} %" for sparsity in sparsities)


def tuned(result: Result) -> bool:
    """Returns whether batch norm was tuned after compression, which scores that changed tell.

    Language models and vision transformers have no batch norm.
    """
    if result.recipe.get("text") is not None:
        return False
    return any(target.before != target.after for seed in result.seeds for target in seed.targets)


def minutes(result: Result) -> float:
    """Returns the minutes that a training took, the mean over the seeds."""
    return mean([seed.seconds for seed in result.seeds]) / 60


def repeated(result: Result) -> str:
    """Returns what a spread was taken over, in words; nothing where there is no spread."""
    if len(result.seeds) > 1:
        return f"{len(result.seeds)} seeds"
    trials = max((target.trials for target in result.seeds[0].targets), default=1)
    return f"{trials} calibration sets" if trials > 1 else ""


def labels(results: Sequence[Result]) -> list[str]:
    """Names results by their titles and, where these are the same, by what sets them apart."""
    settings = [flat(result.recipe) for result in results]
    names = _distinct_names(results, settings)
    if len({*names}) < len(names):
        seeds = [", ".join(str(seed.seed) for seed in result.seeds) for result in results]
        seeded = [{**values, "seed": seed} for values, seed in zip(settings, seeds, strict=True)]
        names = _distinct_names(results, seeded)
    return [
        name if names.count(name) == 1 else f"{name} #{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]


def _distinct_names(
    results: Sequence[Result], settings: Sequence[Mapping[str, object]]
) -> list[str]:
    names = []
    for result, own in zip(results, settings, strict=True):
        alike = [s for r, s in zip(results, settings, strict=True) if r.title == result.title]
        keys = dict.fromkeys(key for other in alike for key in other if key != "title")
        differing = [key for key in keys if any(other.get(key) != own.get(key) for other in alike)]
        details = ", ".join(f"{key}={own.get(key)}" for key in differing)
        names.append(f"{result.title} ({details})" if details else result.title)
    return names


def _summary(measured: Sequence[tuple[float, TargetResult]], metric: str) -> TargetSummary:
    targets = [target for _, target in measured]
    after = spread([target.after for target in targets], metric)
    change = spread([change_from(dense, t.after, metric) for dense, t in measured], metric)
    if len(targets) == 1:
        after = MeanStd(after.mean, targets[0].after_std, metric)
        change = MeanStd(change.mean, targets[0].after_std, metric)
    return TargetSummary(
        operator=targets[0].operator,
        sparsity=mean([target.sparsity for target in targets]),
        model_sparsity=mean([target.model_sparsity for target in targets]),
        before=spread([target.before for target in targets], metric),
        after=after,
        change=change,
    )


def _sort_key(text: str) -> tuple[int, int, float]:
    """Returns the ranks of the pruner and of the kind of operator, and the sparsity."""
    try:
        operator = parse_pruner(text)
    except ValueError:
        return len(_PRUNERS) + 2, 0, 0.0
    pruner = 0
    if isinstance(operator, Pruner):
        known = (i for i, kind in enumerate(_PRUNERS) if isinstance(operator, kind))
        pruner, operator = 1 + next(known, len(_PRUNERS)), operator.pattern
    kind = next((i for i, kind in enumerate(_KINDS) if isinstance(operator, kind)), len(_KINDS))
    level = getattr(operator, "sparsity", 0.0)
    return pruner, kind, level if isinstance(level, float) else 0.0
