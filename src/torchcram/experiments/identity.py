"""In what two runs differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchcram.experiments.results import differences, flat


def explain_differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Returns what differs between two nested mappings: ["cram.rho is 0.1, not 0.05"]."""
    ours, theirs = flat(found), flat(asked)
    return [_difference(key, ours, theirs) for key in differences(found, asked)]


def _difference(key: str, found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    if key not in found:
        return f"{key} is not there, but {asked[key]!r} here"
    if key not in asked:
        return f"{key} is {found[key]!r}, but not given here"
    return f"{key} is {found[key]!r}, not {asked[key]!r}"
