"""Operators as text, for command lines and recipes."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from contextlib import suppress

from torchcram.operators.base import Operator
from torchcram.operators.chain import join
from torchcram.operators.nm import NM
from torchcram.operators.quantize import Quantize
from torchcram.operators.registry import OPERATORS, read_registered
from torchcram.operators.topk import GlobalTopK, RowTopK, UniformTopK

_LEVEL = r"(\d*\.?\d+|\d+\.)"
_TOPK = re.compile(rf"(global|uniform|row):{_LEVEL}(?:-{_LEVEL})?")
_KINDS: dict[str, Callable[[float | tuple[float, float]], Operator]] = {
    "global": GlobalTopK,
    "uniform": UniformTopK,
    "row": RowTopK,
}
_WORDS = (*_KINDS, "nm", "int")
_NM = re.compile(r"nm:(\d+):(\d+)")
_QUANTIZE = re.compile(r"int(\d+)(?::g(\d+))?")

SYNTAX = (
    "global:0.9, uniform:0.8, row:0.5, global:0.3-0.9 (a range to train over), nm:2:4, int4, "
    "int4:g64, or several joined by '+': global:0.5+int8"
)


def operator_syntax() -> str:
    """Returns what the text of an operator may be, with the names that packages registered."""
    names = OPERATORS.names()
    return SYNTAX + (f"; of other packages: {', '.join(names)}" if names else "")


def parse_operator(text: str) -> Operator:
    """Reads an operator from its text; the inverse of `str(operator)`.

    Operators of other packages are read too, see `register_operator`.

    Raises:
        ValueError: naming the text and what is allowed.
    """
    return parse_joined(text, parse_part)


def parse_joined(text: str, read: Callable[[str, str], Operator]) -> Operator:
    """Reads operators joined by "+"; `read` gets one of them, and the whole text for errors."""
    return join([read(part.strip(), text) for part in text.split("+")])


def as_operator(given: Operator | str) -> Operator:
    """Returns an operator as it is, and one that is given as text read."""
    if isinstance(given, str):
        return parse_operator(given)
    if not isinstance(given, Operator):
        raise ValueError(f"{given!r} is neither an Operator nor text such as: {operator_syntax()}")
    return given


def parse_part(part: str, text: str) -> Operator:
    """Reads one operator out of `text`."""
    try:
        operator = _read(part)
    except ValueError as error:
        raise ValueError(f"operator {text!r}: {error}") from None
    if operator is None:
        raise ValueError(
            f"operator {text!r}: cannot read {part!r}{_did_you_mean(part)}; "
            f"allowed: {operator_syntax()}"
        )
    return operator


def closest(word: str, allowed: Iterable[str]) -> list[str]:
    """Returns the allowed words that a misspelled one may stand for, the likeliest first."""
    return difflib.get_close_matches(word.lower(), allowed, cutoff=0.5)


def _read(part: str) -> Operator | None:
    """Reads one operator; None where the text has the form of none."""
    if match := _TOPK.fullmatch(part):
        kind, low, high = match.groups()
        level = float(low) if high is None else (float(low), float(high))
        return _KINDS[kind](level)
    if match := _NM.fullmatch(part):
        return NM(int(match[1]), int(match[2]))
    if match := _QUANTIZE.fullmatch(part):
        return Quantize(int(match[1]), None if match[2] is None else int(match[2]))
    return read_registered(part)


def _did_you_mean(part: str) -> str:
    """Returns the text with its misspelled word corrected, where that can be read, as a remark."""
    word = re.match(r"[^\W\d_]*", part)
    assert word is not None  # noqa: S101  it matches nothing, too
    name, colon, rest = part.partition(":")
    corrected = [kind + part[word.end() :] for kind in closest(word[0], _WORDS)]
    corrected += [kind + colon + rest for kind in closest(name, OPERATORS.names())]
    for text in corrected:
        with suppress(ValueError):
            if _read(text) is not None:
                return f" (did you mean {text}?)"
    return ""


def split_pruner(part: str) -> tuple[str | None, str]:
    """Splits the text of one operator into its pruner and the pattern that the pruner leaves.

    "obs:m64@global:0.9" gives "obs:m64" and "global:0.9"; without a pruner the first is None.
    """
    pruner, at, pattern = part.partition("@")
    return (pruner, pattern) if at else (None, part)


def parse_without_pruners(text: str) -> Operator:
    """Reads the operator that remains of a text when every pruner in it is left out.

    What it reads of "obs:m64@nm:2:4+int8" is nm:2:4+int8: the operator that says which zeros and
    values compressed weights have, with no need to know the pruners.

    Raises:
        ValueError: naming the text and what is allowed.
    """
    return parse_joined(text, lambda part, whole: parse_part(split_pruner(part)[1], whole))
