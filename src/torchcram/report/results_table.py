"""Results as tables, for the terminal and in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table
from rich.text import Text

from torchcram.experiments.evaluation.results import Result, TargetResult, mean
from torchcram.experiments.io.files import slug
from torchcram.experiments.recipe import load_recipe
from torchcram.experiments.recipe.overrides import DISTILLED, FINETUNE
from torchcram.report import summary
from torchcram.report.summary import percent, points
from torchcram.report.table import NOTICEABLE

NOT_RUN = "not run yet"
TRAINED_ON = {"fine-tuned@": FINETUNE, "distilled@": DISTILLED}  # words, and marks in methods
_CHANGE = "vs dense: the change in points"
_NAME = re.compile(r"([^\s/]+)/([^\s/]+)((?:\s+[^\s/]+)*)")


def result_table(result: Result) -> Table:
    """Returns one line per target, for the terminal; means where there are several seeds."""
    over, tuned = summary.repeated(result), summary.tuned(result)
    name = f"{result.task}/{result.model}/{result.method}"
    how = "fine-tuned" if FINETUNE in result.method else "compressed in one shot"
    # as Text, for which brackets are no markup
    table = Table(
        title=Text(f"{name}: test {result.metric} in % on {result.data}, {how}"),
        caption="sparsity in % of the compressible weights and of all parameters; "
        + ("BNT: batch-norm statistics estimated anew; vs dense: BNT - dense" if tuned else _CHANGE)
        + (f"; ± over {over}" if over else ""),
    )
    table.add_column("target", no_wrap=True)
    told = [seed.others for seed in result.seeds]
    told += [one.others for seed in result.seeds for one in seed.targets]
    others = list(dict.fromkeys(name for one in told for name in one or ()))
    measured = ("as is", "BNT") if tuned else (result.metric,)
    timed = any(one.seconds is not None for seed in result.seeds for one in seed.targets)
    for column in ("sparsity", "of all", *measured, "vs dense", *others, *["seconds"] * timed):
        table.add_column(column, justify="right", no_wrap=True)
    blank = [""] * (len(measured) - 1)
    further = [_further(one, [seed.others for seed in result.seeds]) for one in others]
    dense = str(summary.dense(result))
    table.add_row("dense", "", "", dense, *blank, "", *further, end_section=True)
    for operator, row in summary.summaries(result).items():
        targets = [one for seed in result.seeds for one in seed.targets if one.operator == operator]
        table.add_row(
            Text(operator),
            f"{100 * row.sparsity:.1f}",
            f"{100 * row.model_sparsity:.1f}",
            *([percent(row.before.mean)] if tuned else []),
            str(row.after),
            Text(points(row.change.mean), "bold red" if row.change.mean < -NOTICEABLE else ""),
            *[_further(one, [target.others for target in targets]) for one in others],
            *[_seconds(targets)] * timed,
        )
    return table


def _seconds(targets: Sequence[TargetResult]) -> str:
    """Returns the mean of what a pruner took."""
    values = [one.seconds for one in targets if one.seconds is not None]
    return f"{mean(values):.0f}" if values else ""


def _further(name: str, found: Sequence[Mapping[str, float] | None]) -> str:
    """Returns the mean of a further metric, where it was measured."""
    values = [one[name] for one in found if one is not None and name in one]
    return percent(mean(values)) if values else ""


def markdown_table(results: Iterable[Result], name: str) -> str:
    """Returns the table that a marked place in a Markdown file asks for.

    Args:
        results: of any tasks and models.
        name: "task/model" takes all its methods, in the order of their names. Methods after it,
            with blanks between, are taken alone and in this order: "cifar10/resnet20 sgd sam".
            One without a result gets a row that says so. Operators among them are the targets to
            show, in this order, instead of all: "squad/minilm-l6 adam obs@uniform:0.5". Pruners
            that end with @, as "obs@", give every method a further row with the same targets by
            that pruner; "fine-tuned@" and "distilled@" one of them trained on, and
            "obs@fine-tuned@" one of what that pruner left trained on.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(
            f"{name!r} names no results; allowed: task/model or task/model method ... target ..."
        )
    task, model, words = match[1], match[2], match[3].split()
    chosen = [word for word in words if summary.is_operator(word)]
    further = [word for word in words if word.endswith("@")]
    wanted = [word for word in words if word not in (*chosen, *further)]
    found = {one.method: one for one in results if (one.task, one.model) == (task, model)}
    methods = wanted or sorted(found)
    shown = [found[method] for method in methods if method in found]
    targets = chosen or summary.sort_operators(
        operator for one in shown for operator in summary.summaries(one)
    )
    header = ["method", "dense", *map(_code, targets), "seeds", "epochs", "min"]
    rows = []
    for method in methods:
        if method not in found:
            rows.append([_title(f"{task}/{model}/{method}"), NOT_RUN, *[""] * (len(header) - 2)])
            continue
        rows.append(_markdown_row(found[method], targets, data=len({r.data for r in shown}) > 1))
        for kind in further:
            cells = [_further_cell(found, method, kind, target) for target in targets]
            if any(cells):
                how = kind[:-1].replace("@", ", ")
                rows.append([_escaped(f"- {how}"), "", *cells, "", "", ""])
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join(["| " + " | ".join(line) + " |" for line in lines] + ["", _note(shown)]) + "\n"


def _markdown_row(result: Result, targets: Sequence[str], data: bool) -> list[str]:
    cells = [_cell(result, target) for target in targets]
    counts = [str(len(result.seeds)), summary.epochs(result), f"{summary.minutes(result):.1f}"]
    name = result.title + (f" on {result.data}" if data else "")
    return [_escaped(name), str(summary.dense(result)), *cells, *counts]


def _cell(result: Result, target: str) -> str:
    row = summary.summaries(result).get(target)
    if row is None:
        return ""
    # the spread of calibration sets is not that of seeds, so it does not stand here
    accuracy = str(row.after) if len(result.seeds) > 1 else percent(row.after.mean)
    return f"{accuracy} ({points(row.change.mean)})"


def _further_cell(found: Mapping[str, Result], method: str, kind: str, target: str) -> str:
    for word, mark in TRAINED_ON.items():
        if kind.endswith(word):
            operator = kind.removesuffix(word) + target
            on = found.get(f"{method}{mark}{slug(operator)}")
            return "" if on is None else _cell(on, operator)
    return _cell(found[method], kind + target)


def _note(results: Sequence[Result]) -> str:
    """Says what the numbers are, and on which data and machines they were taken."""
    if not results:
        return "Nothing of this has been run yet."
    data = ", ".join(dict.fromkeys(_escaped(one.data) for one in results))
    machines = dict.fromkeys(_escaped(seed.machine) for one in results for seed in one.seeds)
    metric = " and ".join(dict.fromkeys(_escaped(one.metric) for one in results))
    after = " after batch-norm tuning" if any(map(summary.tuned, results)) else ""
    return (
        f"Test {metric} in % on {data}{after}; in brackets the change from the "
        "same model dense, in points. Mean ± standard deviation where there are several seeds. "
        f"Min: minutes of one training, {', '.join(machines)}."
    )


def _title(name: str) -> str:
    """Returns the title of a recipe that comes along; any other has only its name."""
    try:
        return _escaped(load_recipe(name).title)
    except ValueError:
        return _code(name.split("/")[-1])


def _code(text: str) -> str:
    return "`" + " ".join(text.replace("`", "'").replace("|", "\\|").split()) + "`"


def _escaped(text: str) -> str:
    """Returns a text in one line, with what Markdown or HTML would take for its own escaped."""
    return re.sub(r"([\\`*_\[\]<>|&])", r"\\\1", " ".join(text.split()))
