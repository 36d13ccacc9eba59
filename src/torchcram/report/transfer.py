"""Transfers to other tasks: how much the error of a sparse model exceeds that of the dense one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchcram.experiments.evaluation.results import Result, mean, read_result, read_results
from torchcram.experiments.recipe.overrides import DENSE
from torchcram.experiments.results_store import RESULT
from torchcram.experiments.training.run_folder import RUN
from torchcram.report.summary import percent, sort_operators

if TYPE_CHECKING:
    from rich.table import Table

    from torchcram.experiments.evaluation.results import SeedResult, TransferSource

MISSING = "-"
NOTE = (
    "test error in %; in brackets how much it exceeds that of the dense model, "
    "(e_sparse - e_dense) / e_dense in %; mean: over the tasks"
)


@dataclass(frozen=True)
class TaskError:
    """Test error on one task, the mean over the seeds.

    Attributes:
        task: Name of the task.
        error: Test error, from 0 to 1.
        dense_error: Test error of the dense model that it is compared with; None if there is none.
        increase: Relative increase, (error - dense_error) / dense_error; None without a dense
            model, or if that makes no error.
        seeds: Number of seeds.
    """

    task: str
    error: float
    dense_error: float | None
    increase: float | None
    seeds: int


@dataclass(frozen=True)
class TransferRow:
    """A source at one sparsity on all tasks.

    Attributes:
        source: Name of the recipe that the source was trained with.
        title: Title of that recipe.
        at: Operator that it was compressed by or trained for, as text, or "dense".
        dense: Name of the recipe of the source whose dense model it is compared with.
        sparsity: Fraction of zeros in the weights that were compressed.
        model_sparsity: Fraction of zeros in all parameters.
        tasks: Errors on the tasks that it was transferred to.
        mean: Mean relative increase over all tasks that any source of the same data and model was
            transferred to; None if one of them is missing.
    """

    source: str
    title: str
    at: str
    dense: str
    sparsity: float
    model_sparsity: float
    tasks: tuple[TaskError, ...]
    mean: float | None


@dataclass(frozen=True)
class TransferSummary:
    """Transfers of several sources to several tasks.

    Attributes:
        tasks: Names of all tasks.
        rows: Sources at their sparsities, those of a source together.
    """

    tasks: tuple[str, ...]
    rows: tuple[TransferRow, ...]

    def of(self, sources: Sequence[str]) -> TransferSummary:
        """Returns the rows of the sources with these recipes, in this order, and their tasks."""
        rows = [row for name in sources for row in self.rows if row.source == name]
        own = {error.task for row in rows for error in row.tasks}
        return TransferSummary(tuple(task for task in self.tasks if task in own), tuple(rows))


def summarize(results: Iterable[Result]) -> TransferSummary:
    """Compares transferred models with the dense models of their sources.

    Args:
        results: Results of which those of transfers count. Of one seed, the last result counts.
    """
    seeds: dict[tuple[str, str, str], dict[int, SeedResult]] = {}
    sources: dict[tuple[str, str], TransferSource] = {}
    targets: dict[str, str] = {}
    for result in results:
        for seed in result.seeds:
            if (source := seed.source) is None:
                continue
            seeds.setdefault((source.recipe, source.at, source.target), {})[seed.seed] = seed
            sources[source.recipe, source.at] = source
            targets[source.target] = result.task
    tasks = list(targets.values())
    names = {t: task if tasks.count(task) == 1 else t for t, task in targets.items()}
    errors = {key: 1 - mean([s.dense for s in of.values()]) for key, of in seeds.items()}

    def task_error(source: TransferSource, target: str) -> TaskError | None:
        key = (source.recipe, source.at, target)
        if key not in errors:
            return None
        dense = errors.get((source.dense, DENSE, target))
        increase = (errors[key] - dense) / dense if dense else None
        return TaskError(names[target], errors[key], dense, increase, len(seeds[key]))

    rows = []
    for source in _in_order(sources):
        on_tasks = [error for t in sorted(targets) if (error := task_error(source, t)) is not None]
        expected = {t for recipe, _, t in seeds if _group(recipe) == _group(source.recipe)}
        increases = [error.increase for error in on_tasks if error.increase is not None]
        zeros = [
            seed.source
            for (recipe, at, _), of in seeds.items()
            if (recipe, at) == (source.recipe, source.at)
            for seed in of.values()
            if seed.source is not None
        ]
        rows.append(
            TransferRow(
                source=source.recipe,
                title=source.title,
                at=source.at,
                dense=source.dense,
                sparsity=mean([each.sparsity for each in zeros]),
                model_sparsity=mean([each.model_sparsity for each in zeros]),
                tasks=tuple(on_tasks),
                mean=mean(increases) if len(increases) == len(expected) else None,
            )
        )
    return TransferSummary(tuple(names[target] for target in sorted(targets)), tuple(rows))


def _group(recipe: str) -> str:
    """Returns the task and the model of a recipe by its name."""
    return recipe.rpartition("/")[0]


def _in_order(sources: dict[tuple[str, str], TransferSource]) -> list[TransferSource]:
    """Returns the sources as they came, each with its sparsities in order, dense first."""
    ordered = []
    for recipe in dict.fromkeys(recipe for recipe, _ in sources):
        ats = [at for name, at in sources if name == recipe]
        sparse = sort_operators(at for at in ats if at != DENSE)
        ordered += [sources[recipe, at] for at in [DENSE] * (DENSE in ats) + sparse]
    return ordered


def read_transfers(paths: Iterable[Path]) -> list[Result]:
    """Reads results of transfers; results of other trainings are left out.

    Args:
        paths: Folders of results, result files, folders of runs, and folders that hold such.

    Raises:
        ValueError: If a path has no result of a transfer, or a file is not a result.
        OSError: If there is no such file.
    """
    transfers: list[Result] = []
    for path in paths:
        if not path.is_dir():
            results = [read_result(path)]
        elif runs := sorted(file.parent for file in path.rglob(RUN)):
            results = [read_result(run / RESULT) for run in runs if (run / RESULT).exists()]
        else:
            results = read_results(path)
        own = [result for result in results if result.seeds[0].source is not None]
        if not own:
            raise ValueError(f"{path} has no result of a transfer")
        transfers += own
    return transfers


def cells(summary: TransferSummary) -> tuple[list[str], list[list[str]]]:
    """Returns the header and the rows of a table as texts."""
    header = ["source", "at", *summary.tasks, "mean"]
    titles: dict[str, set[str]] = {}
    for row in summary.rows:
        titles.setdefault(row.title, set()).add(row.source)
    rows = []
    for row in summary.rows:
        by_task = {error.task: error for error in row.tasks}
        rows.append(
            [
                row.title if len(titles[row.title]) == 1 else f"{row.title} ({row.source})",
                row.at,
                *[_cell(by_task.get(task), row.at) for task in summary.tasks],
                "" if row.at == DENSE else _increase(row.mean),
            ]
        )
    return header, rows


def _cell(error: TaskError | None, at: str) -> str:
    if error is None:
        return MISSING
    return percent(error.error) + ("" if at == DENSE else f" ({_increase(error.increase)})")


def _increase(value: float | None) -> str:
    return MISSING if value is None else f"{100 * value:+.1f}"


def transfer_table(summary: TransferSummary) -> Table:
    """Returns a row per source and sparsity, for the terminal."""
    from rich.table import Table
    from rich.text import Text

    header, rows = cells(summary)
    table = Table(title="Transfer to other tasks", caption=NOTE)
    for index, column in enumerate(header):
        table.add_column(Text(column), justify="left" if index < 2 else "right", no_wrap=True)
    before = None
    for row, shown in zip(summary.rows, rows, strict=True):
        if before not in (None, row.source):
            table.add_section()
        before = row.source
        table.add_row(*map(Text, shown))
    return table
