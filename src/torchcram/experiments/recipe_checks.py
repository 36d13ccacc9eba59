"""Checks of what recipes say: operators, regular expressions, names and arguments of torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchcram import Operator, parse_operator
from torchcram.experiments.structure import BadValue, did_you_mean, require, shown
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


def require_torch_name(
    key: str, given: str, ours: Sequence[str], theirs: Mapping[str, type]
) -> None:
    """Raises `BadValue` unless `given` is a name of ours or of a class of torch."""
    if given in ours or given in theirs:
        return
    meant = did_you_mean(given, ours)
    alike = [name for name in theirs if name.lower() == given.lower()]
    if alike and not meant:
        meant = f" (did you mean {alike[0]!r}?)"
    allowed = f"{', '.join(ours)}, or of torch: {', '.join(theirs)}"
    raise BadValue(key, f"is {shown(given)}{meant}", allowed)


def require_plain(key: str, args: Mapping[str, Any]) -> None:
    """Raises `BadValue` unless arguments are what YAML and JSON write alike."""
    try:
        same = json.loads(json.dumps(args, allow_nan=False)) == args
    except (TypeError, ValueError):
        same = False
    allowed = "texts, finite numbers, true, false, null, and lists and sections of them"
    require(same, key, args, allowed)


@contextmanager
def require_arguments(key: str, args: Mapping[str, Any], allowed: Iterable[str]) -> Iterator[None]:
    """Raises `BadValue` unless the names of arguments are allowed and the block accepts them."""
    require_plain(key, args)
    names = list(allowed)
    for name in args:
        if name not in names:
            problem = f"is no known argument{did_you_mean(name, names)}"
            raise BadValue(f"{key}.{name}", problem, ", ".join(names) or "none")
    try:
        yield
    except (ArithmeticError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise BadValue(key, f"is {shown(args)}: {error}", ", ".join(names)) from None
