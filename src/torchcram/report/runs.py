"""Runs as a page shows them: put together by task and model, named and coloured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torchcram.experiments.evaluation.results import Result
from torchcram.experiments.io.dict_diff import flat
from torchcram.experiments.recipe.overrides import DISTILLED, FINETUNE
from torchcram.report import summary
from torchcram.report.summary import MeanStd, TargetSummary

COLOURS = 8  # that the style sheet has


@dataclass(frozen=True)
class Run:
    """A result as the page shows it.

    Attributes:
        result: as it was read.
        label: its name in charts and tables.
        style: number of its colour, dashes and markers.
        dense: accuracy of the uncompressed models.
        rows: its targets by operator.
    """

    result: Result
    label: str
    style: int
    dense: MeanStd
    rows: Mapping[str, TargetSummary]

    @property
    def colour(self) -> int:
        """The number of its colour."""
        return self.style % COLOURS

    @property
    def name(self) -> str:
        """The name of the recipe."""
        return f"{self.result.task}/{self.result.model}/{self.result.method}"

    @property
    def made(self) -> str:
        """Seeds, epochs and minutes in words."""
        count, epochs = len(self.result.seeds), summary.epochs(self.result)
        took = summary.duration(60 * summary.minutes(self.result))
        parts = [summary.counted(count, "seed")]
        parts += [f"{epochs} epochs"] if epochs else []
        parts += [took + " each" * (count > 1)]
        return ", ".join(parts)

    @property
    def recipe(self) -> list[tuple[str, str]]:
        """The recipe as keys and values."""
        return [(key, _text(value)) for key, value in flat(self.result.recipe).items()]


@dataclass(frozen=True)
class Group:
    """The runs of one model on one task, which are comparable.

    Attributes:
        name: task and model.
        data: names of the data sets, where they are not the name of the task.
        runs: in the order they were given.
        targets: of all runs.
    """

    name: str
    data: str
    runs: Sequence[Run]
    targets: Sequence[str]

    @property
    def metric(self) -> str:
        """What models are tested by."""
        return " or ".join(dict.fromkeys(run.result.metric for run in self.runs))

    @property
    def tuned(self) -> bool:
        """Whether batch norm was tuned."""
        return any(summary.tuned(run.result) for run in self.runs)

    @property
    def finetuned(self) -> bool:
        """Whether some were trained on after they were compressed."""
        return any(FINETUNE in run.result.method for run in self.runs)

    @property
    def shown(self) -> Sequence[Run]:
        """The runs of charts and tables: a model that was fine-tuned at several targets is one."""
        found: dict[object, Run] = {}
        for run in self.runs:
            method = run.result.method
            base, tuned, _ = method.partition(FINETUNE)
            key = (base, DISTILLED in method) if tuned else id(run)
            if key in found and not found[key].rows.keys() & run.rows.keys():
                label = run.result.title.rpartition(" at ")[0] or found[key].label
                rows = {**found[key].rows, **run.rows}
                found[key] = replace(found[key], label=label, rows=rows)
            else:
                found[key if key not in found else id(run)] = run
        return list(found.values())


def group_runs(results: Sequence[Result]) -> list[Group]:
    """Returns groups in the order of their first results; the same label has the same style."""
    together: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        together.setdefault((result.task, result.model), []).append(result)
    groups, styles = [], dict[str, int]()
    for (task, model), members in together.items():
        runs = [
            Run(one, label, styles.setdefault(label, len(styles)), summary.dense(one), rows)
            for one, label in zip(members, summary.labels(members), strict=True)
            for rows in [summary.summaries(one)]
        ]
        data = ", ".join(dict.fromkeys(one.data for one in members))
        data = "" if data == task else data  # which the heading says already
        targets = summary.sort_operators(operator for run in runs for operator in run.rows)
        groups.append(Group(f"{task} / {model}", data, runs, targets))
    return groups


def _text(value: object) -> str:
    """Writes a value as recipes do, lists without brackets."""
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)
