"""Results as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

from torchcram.experiments.evaluation.results import Result, TargetResult, mean
from torchcram.experiments.metrics import less_is_better
from torchcram.experiments.recipe.overrides import FINETUNE
from torchcram.report import summary
from torchcram.report.summary import (
    PASSES,
    MeanStd,
    change_text,
    in_percent,
    is_noticeable_loss,
    score_text,
)

_BNT = "BNT: batch-norm statistics re-estimated; vs {0}: BNT - {0}"
_CHANGE = "vs {0}: change in points"
_RATIO = "vs {0}: ratio, less is better"


def result_table(result: Result) -> Table:
    """Returns a row per target; means where there are several seeds."""
    over, tuned = summary.repeated(result), summary.tuned(result)
    name = f"{result.task}/{result.model}/{result.method}"
    how = "fine-tuned" if FINETUNE in result.method else "compressed in one shot"
    if (target := summary.trained_for(result)) is not None and FINETUNE not in result.method:
        how = f"trained for {target}"
        if summary.transferred_from(result) is not None:
            how = f"zeros of {target} held"
    reference = "dense" if summary.trained_for(result) is None else "trained"
    change = _BNT if tuned else _RATIO if less_is_better(result.metric) else _CHANGE
    # as Text, for which brackets are no markup
    table = Table(
        title=Text(f"{name}: test {in_percent(result.metric)} on {result.data}, {how}"),
        caption="sparsity in % of the compressible weights and of all parameters; "
        + change.format(reference)
        + (f"; ± over {over}" if over else "")
        + _length(result),
    )
    table.add_column("target", no_wrap=True)
    targets = [target for seed in result.seeds for target in seed.targets]
    measured = [seed.others for seed in result.seeds] + [target.others for target in targets]
    others = list(dict.fromkeys(name for metrics in measured for name in metrics or ()))
    scores = ("as is", "BNT") if tuned else (result.metric,)
    timed = any(target.seconds is not None for target in targets)
    for column in ("sparsity", "of all", *scores, f"vs {reference}", *others, *["seconds"] * timed):
        table.add_column(column, justify="right", no_wrap=True)
    blank = [""] * (len(scores) - 1)
    dense_others = [_mean_of(name, [seed.others for seed in result.seeds]) for name in others]
    dense = str(summary.dense(result))
    form = "as trained" if reference == "trained" else reference
    table.add_row(form, "", "", dense, *blank, "", *dense_others, end_section=True)
    for operator, row in summary.summaries(result).items():
        own = [target for target in targets if target.operator == operator]
        table.add_row(
            Text(operator),
            f"{100 * row.sparsity:.1f}",
            f"{100 * row.model_sparsity:.1f}",
            *([score_text(row.before.mean, result.metric)] if tuned else []),
            str(row.after),
            _change(row.change),
            *[_mean_of(name, [target.others for target in own]) for name in others],
            *[_seconds(own)] * timed,
        )
    return table


def comparison_table(results: Sequence[Result]) -> Table:
    """Returns a row per target with the results of all methods side by side.

    Args:
        results: Results of the same model on the same data, with batch-norm tuning.
    """
    first = results[0]
    table = Table(
        title=Text(f"Test {in_percent(first.metric)} on {first.data}, compressed in one shot"),
        caption="BNT: batch-norm statistics re-estimated; change: BNT - dense, in points"
        + "".join(f"; {result.title}: {_words(result)}" for result in results if _words(result))
        + f"; {PASSES}",
    )
    table.add_column("target", no_wrap=True)
    for result in results:
        for heading, column in ((result.title, "as is"), ("", "BNT"), ("", "change")):
            table.add_column(Text(f"{heading}\n{column}"), justify="right", no_wrap=True)
    dense = [cell for result in results for cell in (str(summary.dense(result)), "", "")]
    table.add_row("dense", *dense, end_section=True)
    rows = [summary.summaries(result) for result in results]
    for operator in summary.sort_operators(operator for row in rows for operator in row):
        cells: list[str | Text] = []
        for targets in rows:
            row = targets.get(operator)
            if row is None:
                cells += ["", "", ""]
            else:
                before = score_text(row.before.mean, row.before.metric)
                cells += [before, str(row.after), _change(row.change)]
        table.add_row(Text(operator), *cells)
    return table


def _length(result: Result) -> str:
    """Returns the cost of the training for the caption; nothing where it is not known."""
    how = "fine-tuned for" if FINETUNE in result.method else "trained for"
    reached = summary.reached(result)
    ended = f"; sparsity before the end of training, which changed it: {reached}" if reached else ""
    return (f"; {how} {_words(result)}; {PASSES}" if _words(result) else "") + ended


def _words(result: Result) -> str:
    return ", ".join(summary.cost_words(result))


def _change(change: MeanStd) -> Text:
    lost = is_noticeable_loss(change.mean, change.metric)
    return Text(change_text(change.mean, change.metric), "bold red" if lost else "")


def _seconds(targets: Sequence[TargetResult]) -> str:
    """Returns the mean time that a pruner took."""
    values = [target.seconds for target in targets if target.seconds is not None]
    return f"{mean(values):.0f}" if values else ""


def _mean_of(name: str, measured: Sequence[Mapping[str, float] | None]) -> str:
    """Returns the mean of a further metric, where it was measured."""
    values = [metrics[name] for metrics in measured if metrics is not None and name in metrics]
    return score_text(mean(values), name) if values else ""
