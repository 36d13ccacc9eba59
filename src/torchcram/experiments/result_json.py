"""The content of a result file, read strictly."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn, TypeVar

from torchcram.experiments.result_data import Result, SeedResult, TargetResult
from torchcram.experiments.structure import BadValue, build, did_you_mean, shown

T = TypeVar("T")

_RESULT: dict[str, type] = {
    "task": str,
    "model": str,
    "method": str,
    "title": str,
    "data": str,
    "recipe": dict,
    "seeds": list,
}
_SEED: dict[str, type] = {
    "seed": int,
    "dense": float,
    "seconds": float,
    "targets": list,
    "machine": str,
    "versions": dict,
}
_KINDS: dict[type, str] = {
    str: "a text",
    int: "an integer",
    float: "a number",
    dict: "a section",
    list: "a list",
}


def result_from_json(text: str | bytes, where: str) -> Result:
    """Makes a result of JSON that is to have its keys and types exactly.

    Args:
        text: of the file.
        where: what it is from, for messages.

    Raises:
        ValueError: naming `where`, the key, what was given and what is allowed.
    """
    try:
        data = json.loads(text, parse_constant=_refuse, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    top = _section(data, _RESULT, where)
    seeds = tuple(_seed(one, f"{where}: seeds[{i}]") for i, one in enumerate(top["seeds"]))
    return _made(Result, {**top, "seeds": seeds}, where)


def _seed(data: object, where: str) -> SeedResult:
    top = _section(data, _SEED, where)
    for name, version in top["versions"].items():
        if not isinstance(version, str):
            raise ValueError(f"{where}: versions.{name} is {shown(version)}; allowed: a text")
    targets = tuple(
        build(TargetResult, one, f"{where}.targets[{i}]") for i, one in enumerate(top["targets"])
    )
    return _made(SeedResult, {**top, "targets": targets}, where)


def _section(data: object, kinds: Mapping[str, type], where: str) -> dict[str, Any]:
    """Returns a mapping that has exactly these keys, with values of these types."""
    keys = ", ".join(kinds)
    if not isinstance(data, dict):
        raise ValueError(f"{where}: the whole is {shown(data)}; allowed: the keys {keys}")
    for name in data:
        if name not in kinds:
            asked = did_you_mean(name, kinds)
            raise ValueError(f"{where}: {name} is no known key{asked}; allowed: {keys}")
    for name, kind in kinds.items():
        if name not in data:
            raise ValueError(f"{where}: {name} is missing; allowed: {_KINDS[kind]}")
        given = data[name]
        # an int is as good as a float, but True and False are no numbers
        fits = isinstance(given, (int, float) if kind is float else kind)
        if not fits or isinstance(given, bool):
            raise ValueError(f"{where}: {name} is {shown(given)}; allowed: {_KINDS[kind]}")
    return data


def _made(kind: type[T], values: dict[str, Any], where: str) -> T:
    try:
        return kind(**values)
    except BadValue as error:
        raise ValueError(f"{where}: {error}") from None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return found
