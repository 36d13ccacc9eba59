"""What a page is made of: run folders, result files, folders of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchcram.experiments.outcome import RESULT
from torchcram.experiments.results import Result, differences, read_result, read_results
from torchcram.experiments.run_folder import RUN
from torchcram.experiments.runlog import read_log

Logs = dict[str, list[dict[str, Any]]]


def read_sources(paths: Iterable[Path]) -> tuple[list[Result], Logs]:
    """Reads results, and the logs of run folders by their titles.

    Run folders of the same recipe with other seeds become one result.

    Args:
        paths: run folders, result files, folders of results.

    Raises:
        ValueError: naming the path that is none of them, or a run that has no result yet.
    """
    results: list[Result] = []
    runs: list[tuple[Path, Result]] = []
    for path in paths:
        if not path.is_dir():
            results.append(read_result(path))
        elif (path / RUN).exists():
            runs.append((path, _result_of(path)))
        else:
            found = read_results(path)
            if not found:
                raise ValueError(f"{path} is neither the folder of a run nor one of results")
            results += found
    return [*merge_seeds([result for _, result in runs]), *results], _logs(runs)


def _result_of(folder: Path) -> Result:
    if not (folder / RESULT).exists():
        raise ValueError(f"{folder} has no {RESULT} yet: `torchcram compress {folder}` makes it")
    return read_result(folder / RESULT)


def merge_seeds(results: Sequence[Result]) -> list[Result]:
    """Puts seeds of the same recipe together; one whose seed comes twice stays by itself."""
    merged: list[Result] = []
    for result in results:
        for place, earlier in enumerate(merged):
            theirs = {one.seed for one in earlier.seeds}
            same = set(differences(earlier.recipe, result.recipe)) <= {"title"}
            if same and not theirs & {one.seed for one in result.seeds}:
                seeds = sorted([*earlier.seeds, *result.seeds], key=lambda one: one.seed)
                merged[place] = replace(earlier, seeds=tuple(seeds))
                break
        else:
            merged.append(result)
    return merged


def _logs(runs: Sequence[tuple[Path, Result]]) -> Logs:
    titles = [result.title for _, result in runs]
    logs: Logs = {}
    for (folder, result), title in zip(runs, titles, strict=True):
        records = read_log(folder)
        if not records:
            continue
        name = title if titles.count(title) == 1 else f"{title}, seed {result.seeds[0].seed}"
        if name in logs:
            name = f"{name}, {folder}"
        logs[name] = [asdict(record) for record in records]
    return logs
