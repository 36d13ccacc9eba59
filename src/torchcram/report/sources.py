"""Sources of a page: run folders, result files, folders of results, and benchmarks in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torchcram.experiments.bench.record import FILES, Bench, read_bench
from torchcram.experiments.evaluation.results import Result, read_result, read_results
from torchcram.experiments.io.dict_diff import differences
from torchcram.experiments.results_store import RESULT
from torchcram.experiments.training.log import read_log
from torchcram.experiments.training.run_folder import RUN


@dataclass(frozen=True)
class Log:
    """The log of a run.

    Attributes:
        result: Index of its result among all results.
        seed: Seed of the run.
        records: Records of `log.jsonl`, with epoch and any of loss, compressed_loss, accuracy, lr.
    """

    result: int
    seed: int
    records: Sequence[Mapping[str, Any]]


def read_sources(paths: Iterable[Path]) -> tuple[list[Result], list[Log]]:
    """Reads results, and the logs of run folders.

    Run folders of the same recipe with different seeds become one result.

    Args:
        paths: Run folders, result files, folders of results.

    Raises:
        ValueError: If a path is none of them, or a run has no result yet; the message names it.
    """
    results: list[Result] = []
    runs: list[tuple[Path, Result]] = []
    for path in paths:
        if not path.is_dir():
            results.append(read_result(path))
        elif (path / RUN).exists():
            runs.append((path, _result_of(path)))
        else:
            collected = read_results(path)
            if not collected:
                raise ValueError(f"{path} is neither a run folder nor a folder of results")
            results += collected
    merged, indices = _merge([result for _, result in runs])
    logs = [
        Log(index, result.seeds[0].seed, [asdict(record) for record in records])
        for (folder, result), index in zip(runs, indices, strict=True)
        if (records := read_log(folder))
    ]
    return [*merged, *results], logs


def read_benches(paths: Iterable[Path]) -> list[Bench]:
    """Reads what `torchcram bench` wrote to run folders; other folders have none.

    Raises:
        ValueError: If a file is not a benchmark; the message names it.
    """
    files = [path / name for path in paths for name in FILES.values()]
    return [read_bench(file) for file in files if file.is_file()]


def _result_of(folder: Path) -> Result:
    if not (folder / RESULT).exists():
        raise ValueError(
            f"{folder} has no {RESULT} yet: finish its training, or run "
            f"`torchcram compress {folder}`"
        )
    return read_result(folder / RESULT)


def merge_seeds(results: Sequence[Result]) -> list[Result]:
    """Merges results of the same recipe with different seeds; a repeated seed stays separate."""
    return _merge(results)[0]


def _merge(results: Sequence[Result]) -> tuple[list[Result], list[int]]:
    """Returns the merged results, and for each given result the index of the one it went into."""
    merged: list[Result] = []
    indices: list[int] = []
    for result in results:
        seeds = {seed.seed for seed in result.seeds}
        for index, earlier in enumerate(merged):
            same = set(differences(earlier.recipe, result.recipe)) <= {"title"}
            if same and not seeds & {seed.seed for seed in earlier.seeds}:
                together = sorted([*earlier.seeds, *result.seeds], key=lambda seed: seed.seed)
                merged[index] = replace(earlier, seeds=tuple(together))
                indices.append(index)
                break
        else:
            indices.append(len(merged))
            merged.append(result)
    return merged, indices
