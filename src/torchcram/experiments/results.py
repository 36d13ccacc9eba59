"""Result files: one JSON file per recipe with one entry per seed, and what they come to."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchcram.experiments.files import write_atomically
from torchcram.experiments.result_data import Result, SeedResult, TargetResult
from torchcram.experiments.result_json import result_from_json

if TYPE_CHECKING:
    from torchcram.experiments.recipe import Recipe

__all__ = [
    "Result",
    "SeedResult",
    "TargetResult",
    "differences",
    "flat",
    "mean",
    "merge_seed",
    "read_result",
    "read_results",
    "std",
    "write_result",
]


def read_result(path: str | Path) -> Result:
    """Reads a result file.

    Raises:
        ValueError: naming the file, the key, what was given and what is allowed.
        OSError: if there is no such file.
    """
    return result_from_json(Path(path).read_bytes(), str(path))


def read_results(folder: str | Path) -> list[Result]:
    """Reads every `<task>/<model>/<method>.json` below a folder, in the order of their names.

    Raises:
        ValueError: for a file that is no result, or that holds the one of another name.
    """
    folder, results = Path(folder), []
    for path in sorted(folder.glob("*/*/*.json")):
        result = read_result(path)
        if folder / result.path != path:
            raise ValueError(f"{path} holds the result that belongs into {folder / result.path}")
        results.append(result)
    return results


def write_result(result: Result, path: str | Path) -> None:
    """Writes a result file; whenever this stops, the old or the new one is there as a whole."""
    text = json.dumps(asdict(result), indent=2, allow_nan=False, ensure_ascii=False)
    write_atomically(Path(path), f"{text}\n".encode())


def merge_seed(result: Result | None, recipe: Recipe, seed: SeedResult) -> Result:
    """Adds a seed to a result, in place of an earlier one of the same number.

    Args:
        result: of earlier seeds; None begins a new one.
        recipe: by which the seed was trained. Its title may have changed, nothing else.
        seed: what came out.

    Raises:
        ValueError: naming the keys in which the recipe differs from that of the earlier seeds.
    """
    plain = json.loads(json.dumps(recipe.to_dict(), allow_nan=False))
    keys = [] if result is None else differences(result.recipe, plain)
    if keys and keys != ["title"]:
        raise ValueError(
            f"{recipe.name}: seed {seed.seed} was trained by another recipe than the earlier "
            f"seeds; they differ in {', '.join(keys)}"
        )
    earlier = () if result is None else result.seeds
    others = [one for one in earlier if one.seed != seed.seed]
    return Result(
        task=recipe.task,
        model=recipe.architecture,
        method=recipe.method,
        title=recipe.title,
        data=recipe.data.name,
        recipe=plain,
        seeds=tuple(sorted([*others, seed], key=lambda one: one.seed)),
    )


def flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested keys as dotted names: {"cram": {"rho": 0.1}} as {"cram.rho": 0.1}."""
    return dict(_flat(recipe, ""))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the dotted names of the keys that are not the same in two recipes."""
    first, second = flat(one), flat(other)
    missing = object()
    keys = dict.fromkeys([*first, *second])
    return [key for key in keys if first.get(key, missing) != second.get(key, missing)]


def mean(values: Sequence[float]) -> float:
    """Returns the mean of at least one value."""
    return statistics.fmean(values)


def std(values: Sequence[float]) -> float | None:
    """Returns the standard deviation of a sample; None for one value, which has none."""
    return statistics.stdev(values) if len(values) > 1 else None


def _flat(section: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value
