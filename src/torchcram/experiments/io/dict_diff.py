"""In what two nested mappings differ: recipes, or what runs are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested keys as dotted names: {"cram": {"rho": 0.1}} as {"cram.rho": 0.1}."""
    return dict(_flat(recipe, ""))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Returns the dotted names of the keys that are not the same in both."""
    first, second = flat(one), flat(other)
    missing = object()
    keys = dict.fromkeys([*first, *second])
    return [key for key in keys if first.get(key, missing) != second.get(key, missing)]


def explain_differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Returns what differs in words: ["cram.rho is 0.1, not 0.05"]."""
    ours, theirs = flat(found), flat(asked)
    return [_difference(key, ours, theirs) for key in differences(found, asked)]


def _flat(section: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{above}{key}.")
        else:
            yield above + key, value


def _difference(key: str, found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    if key not in found:
        return f"{key} is not there, but {asked[key]!r} here"
    if key not in asked:
        return f"{key} is {found[key]!r}, but not given here"
    return f"{key} is {found[key]!r}, not {asked[key]!r}"
