"""What a page is made of: run folders, result files, folders of results."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchcram.experiments.evaluation.results import Result, read_result, read_results
from torchcram.experiments.io.dict_diff import differences
from torchcram.experiments.results_store import RESULT
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import RUN


@dataclass(frozen=True)
class Log:
    """What a run logged.

    Attributes:
        result: place of its result among all.
        seed: of the run.
        records: of `log.jsonl`, with epoch and any of loss, compressed_loss, accuracy, lr.
    """

    result: int
    seed: int
    records: Sequence[Mapping[str, Any]]


def read_sources(paths: Iterable[Path]) -> tuple[list[Result], list[Log]]:
    """Reads results, and the logs of run folders.

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
    merged, places = _merge([result for _, result in runs])
    logs = [
        Log(place, result.seeds[0].seed, [asdict(record) for record in records])
        for (folder, result), place in zip(runs, places, strict=True)
        if (records := read_log(folder))
    ]
    return [*merged, *results], logs


def _result_of(folder: Path) -> Result:
    if not (folder / RESULT).exists():
        raise ValueError(
            f"{folder} has no {RESULT} yet: train it to its end, or `torchcram compress {folder}`"
        )
    return read_result(folder / RESULT)


def merge_seeds(results: Sequence[Result]) -> list[Result]:
    """Puts seeds of the same recipe together; one whose seed comes twice stays by itself."""
    return _merge(results)[0]


def _merge(results: Sequence[Result]) -> tuple[list[Result], list[int]]:
    """Returns what came out, and where each went."""
    merged: list[Result] = []
    places: list[int] = []
    for result in results:
        for place, earlier in enumerate(merged):
            theirs = {one.seed for one in earlier.seeds}
            same = set(differences(earlier.recipe, result.recipe)) <= {"title"}
            if same and not theirs & {one.seed for one in result.seeds}:
                seeds = sorted([*earlier.seeds, *result.seeds], key=lambda one: one.seed)
                merged[place] = replace(earlier, seeds=tuple(seeds))
                places.append(place)
                break
        else:
            places.append(len(merged))
            merged.append(result)
    return merged, places
