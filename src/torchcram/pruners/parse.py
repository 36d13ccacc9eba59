"""Pruners as text, for command lines and recipes."""

from __future__ import annotations

import re
from typing import Any

from torchcram.operators import Operator, Sparsifier
from torchcram.operators.parse import closest, parse_joined, parse_part, split_pruner
from torchcram.pruners.base import Pruner
from torchcram.pruners.obs import Obs
from torchcram.pruners.sparsegpt import SparseGPT
from torchcram.pruners.wanda import Wanda

KINDS: dict[str, type[Pruner]] = {kind.kind: kind for kind in (Obs, Wanda, SparseGPT)}
SYNTAX = f"{'@..., '.join(KINDS)}@..., with global:0.9, uniform:0.8, row:0.5 or nm:2:4 after the @"
_INTEGER = re.compile(r"\d+")
_FLOAT = re.compile(r"(\d+\.?\d*|\.\d+)(e-?\d+)?")


def parse_pruner(text: str) -> Operator:
    """Reads an operator that may look at data, from its text; the inverse of `str(operator)`.

    Beside pruners, such as "obs@uniform:0.7" or with options "obs:r8:d1e-5@uniform:0.7", it reads
    all that `parse_operator` does, joined by "+" too.

    Raises:
        ValueError: naming the text and what is allowed.
    """
    return parse_joined(text, _parse_part)


def _parse_part(part: str, text: str) -> Operator:
    named, pattern = split_pruner(part)
    if named is None:
        return parse_part(part, text)
    kind, *options = named.split(":")
    if kind not in KINDS:
        meant = [f" (did you mean {known}?)" for known in closest(kind, KINDS)]
        raise ValueError(
            f"operator {text!r}: there is no pruner {kind!r}{''.join(meant[:1])}; allowed: {SYNTAX}"
        )
    found = parse_part(pattern, text)
    if not isinstance(found, Sparsifier):
        raise ValueError(
            f"operator {text!r}: {pattern!r} is no pattern of zeros; allowed: {SYNTAX}"
        )
    try:
        return KINDS[kind](found, **_options(KINDS[kind], options))
    except ValueError as error:
        raise ValueError(f"operator {text!r}: {error}") from None


def _options(kind: type[Pruner], given: list[str]) -> dict[str, Any]:
    """Reads options such as "r8", a letter and a number."""
    found: dict[str, Any] = {}
    for text in given:
        option = kind.letters.get(text[:1])
        number = (_FLOAT if option == "damping" else _INTEGER).fullmatch(text[1:])
        if option is None or number is None or option in found:
            letters = ", ".join(f"{letter} ({name})" for letter, name in kind.letters.items())
            raise ValueError(
                f"cannot read the option {text!r}; allowed are "
                + (f"each once, with a number behind it: {letters}" if letters else "none")
            )
        found[option] = (float if option == "damping" else int)(number[0])
    return found
