"""How good a model is, by whatever metric its task has."""

from __future__ import annotations

from dataclasses import dataclass

ACCURACY = "accuracy"


@dataclass(frozen=True)
class Score:
    """What a test came to.

    Attributes:
        value: of the metric that counts, from 0 to 1; the more the better.
        metric: what it is.
        others: further metrics, by name.
    """

    value: float
    metric: str = ACCURACY
    others: dict[str, float] | None = None
