"""What recipes have as text: operators and regular expressions, refused where they stand."""

from __future__ import annotations

import re
from collections.abc import Callable

from torchcram import Operator, parse_operator
from torchcram.experiments.structure import BadValue
from torchcram.operators.parse import operator_syntax
from torchcram.pruners import parse_pruner
from torchcram.pruners.parse import pruner_syntax


def read_operators(
    key: str, texts: tuple[str, ...], read: Callable[[str], Operator] = parse_operator
) -> list[Operator]:
    """Returns the operators of a list, as `read_operator` does."""
    return [read_operator(f"{key}[{place}]", text, read) for place, text in enumerate(texts)]


def read_operator(
    key: str, text: str, read: Callable[[str], Operator] = parse_operator
) -> Operator:
    """Returns an operator.

    Args:
        key: where it stands.
        text: of it.
        read: `parse_pruner` where pruners are allowed too.

    Raises:
        BadValue: naming what is allowed.
    """
    try:
        return read(text)
    except ValueError as error:
        problem = str(error).partition("; allowed: ")[0]
        also = f"; {pruner_syntax()}" if read is parse_pruner else ""
        raise BadValue(key, f"is no {problem}", operator_syntax() + also) from None


def require_pattern(key: str, pattern: str | None) -> None:
    """Raises `BadValue` unless `pattern` is a regular expression or None."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise BadValue(key, f"is {pattern!r}: {error}", "a regular expression, or null") from None
