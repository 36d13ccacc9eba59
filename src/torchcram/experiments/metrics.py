"""Metrics: whether more or less of each is better, and how values are compared.

A score is a fraction from 0 to 1, of which more is better, unless it is a perplexity: a number from
1 up, of which less is better. The last word of a metric's name tells which: "F1", "perplexity",
"wikitext-2 perplexity".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

PERPLEXITY = "perplexity"
WORST_PERPLEXITY = 1e30  # what overflows or is not a number counts as this


def less_is_better(metric: str) -> bool:
    """Returns whether less of a metric is better, and its values are plain numbers."""
    return metric.split()[-1:] == [PERPLEXITY]


def goodness(value: float, metric: str) -> float:
    """Returns a value so that more is better, to sort and to compare by."""
    return -value if less_is_better(metric) else value


def best_index(values: Sequence[float], metric: str) -> int:
    """Returns the index of the best of at least one value, the first of several."""
    return max(range(len(values)), key=lambda index: goodness(values[index], metric))


def change_from(dense: float, value: float, metric: str) -> float:
    """Returns how a value differs from that of the dense model.

    Returns:
        Ratio of perplexities, 1 where nothing changed; difference of fractions otherwise.
    """
    return value / dense if less_is_better(metric) else value - dense


def average(values: Sequence[float], metric: str) -> float:
    """Returns the mean over targets; of perplexities the geometric mean, as of losses."""
    return (statistics.geometric_mean if less_is_better(metric) else statistics.fmean)(values)


def is_possible(value: float, metric: str) -> bool:
    """Returns whether a metric can have a value."""
    if less_is_better(metric):
        return 1 <= value <= WORST_PERPLEXITY
    return 0 <= value <= 1


def perplexity(loss: float) -> float:
    """Returns the perplexity of a mean loss per token, at most `WORST_PERPLEXITY`."""
    if not loss < math.log(WORST_PERPLEXITY):  # also if it is not a number
        return WORST_PERPLEXITY
    return max(1.0, math.exp(loss))
