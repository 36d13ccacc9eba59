"""Pruners as text, for command lines and recipes."""

from __future__ import annotations

from torchcram.operators import Chain, Operator, Sparsifier, parse_operator
from torchcram.operators.parse import SYNTAX as PLAIN
from torchcram.pruners.base import Pruner
from torchcram.pruners.obs import Obs
from torchcram.pruners.rows import RowTopK
from torchcram.pruners.sparsegpt import SparseGPT
from torchcram.pruners.wanda import Wanda

KINDS: dict[str, type[Pruner]] = {kind.kind: kind for kind in (Obs, Wanda, SparseGPT)}
SYNTAX = f"{'@..., '.join(KINDS)}@..., with global:0.9, uniform:0.8, row:0.5 or nm:2:4 after the @"


def parse_pruner(text: str) -> Operator:
    """Reads an operator that may look at data, from its text; the inverse of `str(operator)`.

    Beside pruners, such as "obs@uniform:0.7", it reads "row:0.5" and all that `parse_operator`
    does, joined by "+" too.

    Raises:
        ValueError: naming the text and what is allowed.
    """
    first, *others = (_parse_one(part.strip(), text) for part in text.split("+"))
    for other in others:
        first = Chain(first, other)
    return first


def _parse_one(part: str, text: str) -> Operator:
    kind, at, pattern = part.partition("@")
    try:
        if not at:
            return _parse_pattern(part)
        if kind not in KINDS:
            raise ValueError(f"there is no pruner {kind!r}; allowed: {SYNTAX}")
        found = _parse_pattern(pattern)
        if not isinstance(found, Sparsifier):
            raise ValueError(f"{pattern!r} is no pattern of zeros; allowed: {SYNTAX}")
        return KINDS[kind](found)
    except ValueError as error:
        raise ValueError(f"operator {text!r}: {error}") from None


def _parse_pattern(part: str) -> Operator:
    kind, colon, level = part.partition(":")
    try:
        if kind == "row" and colon:  # the same levels as uniform has
            alike = parse_operator(f"uniform:{level}")
            return RowTopK(alike.sparsity)  # type: ignore[attr-defined]
        return parse_operator(part)
    except ValueError:
        if kind == "row":
            raise ValueError(f"cannot read {part!r}; allowed: row:0.5") from None
        raise ValueError(f"cannot read {part!r}; allowed: {PLAIN}; {SYNTAX}") from None
