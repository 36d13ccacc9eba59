"""What several sparsities cost: the passes of all trainings that they need, and the score at each.

One training of CrAM+ serves all targets. Most other methods need a training for each of them, and
fine-tuning adds a shorter one. Results tell by their names and recipes which is which:

results/<task>/<model>/cram-plus-multi.json             a training for all targets
results/<task>/<model>/sgd-finetune-global-0.9.json     a further training for global:0.9
results/<task>/<model>/dpf-k90.json                     a training for global:0.9 alone
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING

from torchcram.experiments.recipe.family import target_suffix, trained_words
from torchcram.experiments.recipe.overrides import DENSE, DISTILLED, FINETUNE
from torchcram.operators.parse import parse_operator
from torchcram.pruners import Pruner, parse_pruner
from torchcram.report import summary
from torchcram.report.summary import PASSES, MeanStd, in_percent

if TYPE_CHECKING:
    from rich.table import Table

    from torchcram.experiments.evaluation.results import Result

NOTE = f"“for 3”: passes of all trainings that the first 3 targets need; {PASSES}"


@dataclass(frozen=True)
class MethodCost:
    """Cost of the models that a method gives at several targets, and their scores.

    Attributes:
        method: Name of the method in recipes, without the target that it was trained for.
        after: Steps that follow the training, such as a pruner and fine-tuning; an empty text for
            none.
        title: Name in tables.
        per_target: Whether every target needs a training from the start.
        passes: Passes of all trainings for the first 1, 2, ... targets, up to the first target
            without a score.
        at_most: Whether early stopping may have ended a training earlier, which older files do not
            say.
        scores: Mean test scores by target.
        seeds: Numbers of seeds that the scores are means of, in ascending order.
    """

    method: str
    after: str
    title: str
    per_target: bool
    passes: tuple[float, ...]
    at_most: bool
    scores: dict[str, MeanStd]
    seeds: tuple[int, ...]


@dataclass(frozen=True)
class CostComparison:
    """Costs of several methods for one model on one task.

    Attributes:
        name: Task and model, as in the names of recipes.
        data: Exact name of the dataset.
        metric: Name of the test score.
        tuned: Whether batch norm was tuned after compression.
        targets: Targets in the order in which they are served.
        methods: Methods with a score at one target or more; those with one training for all targets
            come first.
    """

    name: str
    data: str
    metric: str
    tuned: bool
    targets: tuple[str, ...]
    methods: tuple[MethodCost, ...]

    @property
    def is_paid_once(self) -> bool:
        """Whether no method needs more passes for more targets."""
        return all(len({*cost.passes}) <= 1 and not cost.per_target for cost in self.methods)

    def of(self, methods: Sequence[str]) -> CostComparison:
        """Returns these methods in this order, with everything that follows their trainings."""
        shown = tuple(cost for name in methods for cost in self.methods if cost.method == name)
        return replace(self, methods=shown)


@dataclass(frozen=True)
class CostComparisons:
    """Comparisons of all models on all tasks."""

    comparisons: tuple[CostComparison, ...]

    def one(self, name: str) -> CostComparison | None:
        """Returns the comparison with a name, "<task>/<model>", if there is one."""
        return next((each for each in self.comparisons if each.name == name), None)


def compare_costs(results: Iterable[Result], targets: Sequence[str] = ()) -> CostComparisons:
    """Compares what methods cost, for every model on every task.

    Args:
        results: Results of any kind; those of transfers are left out, and so is fine-tuning after a
            training that has no result.
        targets: Operators in the order in which they are served. By default those that models were
            trained or fine-tuned for, by their sparsity; if there are none, all one-shot targets.

    Raises:
        ValueError: If the recipe of a result does not say its epochs.
    """
    groups: dict[str, list[Result]] = {}
    for result in results:
        if summary.transferred_from(result) is None:
            groups.setdefault(f"{result.task}/{result.model}", []).append(result)
    comparisons = []
    for name, members in groups.items():
        served = tuple(targets) or _served(members)
        costs = [_cost_of(way, served) for way in _ways(members, served) if way.models]
        costs.sort(key=lambda cost: cost.per_target)
        comparisons.append(
            CostComparison(
                name,
                data=", ".join(dict.fromkeys(result.data for result in members)),
                metric=members[0].metric,
                tuned=any(map(summary.tuned, members)),
                targets=served,
                methods=tuple(costs),
            )
        )
    return CostComparisons(tuple(comparisons))


@dataclass(frozen=True)
class _Model:
    """A model at one target: the trainings that it needs beyond those for all, and its score."""

    trainings: tuple[Result, ...]
    score: MeanStd
    seeds: int


@dataclass(frozen=True)
class _Way:
    """A way to get models at several targets.

    Attributes:
        method: Name of the method, without the target that it was trained for.
        after: Steps that follow the training; an empty text for none.
        title: Title of the method, without the target that it was trained for.
        shared: Trainings that all targets share.
        models: Models by their targets.
    """

    method: str
    after: str
    title: str
    shared: tuple[Result, ...]
    models: dict[str, _Model] = field(default_factory=dict)


def _ways(results: Sequence[Result], targets: Sequence[str]) -> list[_Way]:
    """Returns all ways that lead to a target, those of a method one after another."""
    ways: dict[tuple[str, str], _Way] = {}

    def add(start: Result, after: str, shared: tuple[Result, ...], models: _Models) -> None:
        method, title = _without_target(start)
        way = ways.setdefault((method, after), _Way(method, after, title, shared))
        way.models.update(models)

    starts = {result.method: result for result in results if FINETUNE not in result.method}
    for start in starts.values():
        trained = summary.trained_for(start)
        if trained is None:
            for pruner in _pruners(start):
                add(start, pruner, (start,), dict(_one_shot(start, targets, pruner)))
            continue
        model = _Model((start,), summary.trained_score(start), len(start.seeds))
        add(start, "", (), {at: model for at in targets if _counts_for(trained, at)})
    for tuned in results:
        before, finetuned, at = tuned.method.partition(FINETUNE)
        source = starts.get(before)
        if not finetuned or source is None:
            continue
        word = "distilled" if DISTILLED in tuned.method else "fine-tuned"
        if at == DENSE:
            add(source, word, (source, tuned), dict(_one_shot(tuned, targets)))
            continue
        operator = tuned.seeds[0].targets[0].operator
        pruner, pattern = _split(operator)
        per_target = summary.trained_for(source) is not None
        trainings = (source, tuned) if per_target else (tuned,)
        model = _model(trainings, tuned, operator)
        after = ", ".join(part for part in (pruner, word) if part)
        add(source, after, () if per_target else (source,), {pattern: model})
    order = {_without_target(start)[0]: number for number, start in enumerate(starts.values())}
    served = [replace(way, models=_only(way.models, targets)) for way in ways.values()]
    return sorted(served, key=lambda way: order[way.method])


_Models = dict[str, _Model]


def _only(models: _Models, targets: Sequence[str]) -> _Models:
    return {target: models[target] for target in targets if target in models}


def _one_shot(
    result: Result, targets: Sequence[str], pruner: str = ""
) -> Iterator[tuple[str, _Model]]:
    """Yields a trained model compressed in one shot, by a pruner or by magnitude."""
    known = summary.summaries(result)
    for target in targets:
        operator = f"{pruner}@{target}" if pruner else target
        if operator in known:
            yield target, _model((), result, operator)


def _model(trainings: tuple[Result, ...], result: Result, operator: str) -> _Model:
    """Returns a model whose score is one of a result, over the seeds that have it."""
    scores = [
        target.after
        for seed in result.seeds
        for target in seed.targets
        if target.operator == operator
    ]
    return _Model(trainings, summary.spread(scores, result.metric), len(scores))


def _cost_of(way: _Way, targets: Sequence[str]) -> MethodCost:
    served = list(takewhile(way.models.__contains__, targets))
    shared = [_cost(result) for result in way.shared]
    single = [[_cost(each) for each in way.models[target].trainings] for target in served]
    start = sum(cost.passes for cost in shared)
    totals = accumulate(sum(cost.passes for cost in costs) for costs in single)
    return MethodCost(
        method=way.method,
        after=way.after,
        title=", ".join(part for part in (way.title, way.after) if part),
        per_target=not way.shared,
        passes=tuple(summary.rounded(start + total) for total in totals),
        at_most=any(cost.at_most for costs in (shared, *single) for cost in costs),
        scores={target: model.score for target, model in way.models.items()},
        seeds=tuple(sorted({model.seeds for model in way.models.values()})),
    )


def _cost(result: Result) -> summary.Cost:
    cost = summary.cost([result])
    if cost is None:
        raise ValueError(f"the result of {result.path} does not say its epochs")
    return cost


def _without_target(result: Result) -> tuple[str, str]:
    """Returns the method and the title of a training, without the target that it was for."""
    target = summary.trained_for(result)
    if target is None:
        return result.method, result.title
    operator = parse_operator(target)
    method = result.method.removesuffix(target_suffix(operator))
    return method, result.title.removesuffix(trained_words(operator))


def _split(operator: str) -> tuple[str, str]:
    """Returns the pruner of a target and the pattern that it selects: "obs", "uniform:0.5"."""
    parsed = parse_pruner(operator)
    if isinstance(parsed, Pruner):
        return operator.partition("@")[0], str(parsed.pattern)
    return "", operator


def _pruners(result: Result) -> list[str]:
    """Returns the pruners among the targets of a result; magnitude, the empty text, comes first."""
    operators = [target.operator for seed in result.seeds for target in seed.targets]
    return list(dict.fromkeys(["", *(_split(operator)[0] for operator in operators)]))


def _counts_for(trained: str, target: str) -> bool:
    """Returns whether a model counts for a target; a method may need another pattern."""
    level = summary.sparsity(trained)
    return trained == target or (level is not None and level == summary.sparsity(target))


def _served(results: Sequence[Result]) -> tuple[str, ...]:
    """Returns the targets of trainings for one target, each sparsity once, or all one-shot ones."""
    single = [target for result in results if (target := summary.trained_for(result)) is not None]
    single += [
        _split(seed.targets[0].operator)[1]
        for result in results
        if FINETUNE in result.method and not result.method.endswith(f"{FINETUNE}{DENSE}")
        for seed in result.seeds
    ]
    if not single:
        measured = [target.operator for r in results for seed in r.seeds for target in seed.targets]
        return tuple(op for op in summary.sort_operators(measured) if not _split(op)[0])
    targets: list[str] = []
    for target in summary.sort_operators(single):
        if not any(_counts_for(target, other) for other in targets):
            targets.append(target)
    return tuple(targets)


def cells(comparison: CostComparison) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of a table as texts."""
    counts = [f"for {count}" for count in range(1, len(comparison.targets) + 1)]
    if comparison.is_paid_once:
        counts = ["passes"]
    rows = []
    for cost in comparison.methods:
        passes = ["≤ " * cost.at_most + summary.number(value) for value in cost.passes]
        passes = [*passes, *[""] * len(counts)][: len(counts)]
        scores = [str(cost.scores.get(target, "")) for target in comparison.targets]
        seeds = " to ".join(dict.fromkeys(map(str, (cost.seeds[0], cost.seeds[-1]))))
        rows.append([cost.title, *passes, *scores, seeds])
    return ["method", *counts, *comparison.targets, "seeds"], rows


def note(comparison: CostComparison) -> str:
    """Returns what the numbers of the table are."""
    spread = any(cost.seeds[-1] > 1 for cost in comparison.methods)
    deviation = ", mean ± standard deviation over seeds" if spread else ""
    tuned = ", after batch-norm tuning" if comparison.tuned else ""
    score = f"test {in_percent(comparison.metric)} on {comparison.data}{tuned}{deviation}"
    return f"{PASSES if comparison.is_paid_once else NOTE}; under the targets: {score}"


def cost_table(comparison: CostComparison) -> Table:
    """Returns a row per method, for the terminal."""
    from rich.table import Table
    from rich.text import Text

    header, rows = cells(comparison)
    title = Text(f"{comparison.name}: what several targets cost")
    table = Table(title=title, caption=note(comparison))
    for index, column in enumerate(header):
        table.add_column(Text(column), justify="right" if index else "left", no_wrap=True)
    before = None
    for cost, row in zip(comparison.methods, rows, strict=True):
        if before not in (None, cost.per_target):
            table.add_section()
        before = cost.per_target
        table.add_row(*map(Text, row))
    return table
