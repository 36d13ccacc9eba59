"""Differences between nested mappings, such as recipes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested keys as dotted names: {"cram": {"rho": 0.1}} as {"cram.rho": 0.1}."""
    return dict(_flat(mapping, ""))


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Returns the dotted names of the keys whose values differ or that only one mapping has."""
    ours, theirs = flat(first), flat(second)
    missing = object()
    keys = dict.fromkeys([*ours, *theirs])
    return [key for key in keys if ours.get(key, missing) != theirs.get(key, missing)]


def explain_differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Returns a phrase for each difference: ["cram.rho is 0.1, not 0.05"].

    Args:
        stored: Mapping of an earlier run or of another process.
        current: Mapping that it is compared with.
    """
    theirs, ours = flat(stored), flat(current)
    return [_explain(key, theirs, ours) for key in differences(stored, current)]


def _flat(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _explain(key: str, stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    if key not in stored:
        return f"{key} is not set, but {current[key]!r} here"
    if key not in current:
        return f"{key} is {stored[key]!r}, but not set here"
    return f"{key} is {stored[key]!r}, not {current[key]!r}"
