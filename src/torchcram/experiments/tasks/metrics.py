"""Metrics: those of SQuAD by its official definition, and those of GLUE."""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # ASCII alone, as SQuAD has it


def normalised(answer: str) -> str:
    """Returns an answer in lower case without punctuation, articles and needless blanks."""
    bare = answer.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Returns 1 if the normalised answer is one of the normalised right ones, else 0."""
    return float(normalised(answer) in map(normalised, right))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """2 p r / (p + r) over the words that two normalised answers share; the best right one counts.

    Nothing shared is 0, even where both are empty, as SQuAD has it.
    """
    words = normalised(answer).split()
    return max((_f1(words, normalised(one).split()) for one in right), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    same = sum((Counter(words) & Counter(right)).values())
    return 2 * same / (len(words) + len(right)) if same else 0.0


def binary_scores(counts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Returns accuracy, and of two classes F1 of the second and the Matthews correlation.

    Where a denominator is 0, as with one class alone, F1 and the correlation are 0.

    Args:
        counts: `counts[right][said]`, how often a label was given.
    """
    total = sum(map(sum, counts))
    scores = {"accuracy": sum(row[place] for place, row in enumerate(counts)) / total}
    if len(counts) == 2:
        (tn, fp), (fn, tp) = counts
        scores["F1"] = 2 * tp / (2 * tp + fp + fn) if tp else 0.0
        scale = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
        scores["Matthews correlation"] = (tp * tn - fp * fn) / scale if scale else 0.0
    return scores
