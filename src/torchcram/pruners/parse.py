"""Pruners as text, the registry of pruners of other packages, and pruning by either."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from torchcram.compress import compress_
from torchcram.operators import Operator, Sparsifier
from torchcram.operators.parse import Registry, closest, parse_joined, parse_part, split_pruner
from torchcram.pruners.base import Loss, Pruner, bind
from torchcram.pruners.obs import Obs
from torchcram.pruners.sparsegpt import SparseGPT
from torchcram.pruners.wanda import Wanda

if TYPE_CHECKING:
    from torch import nn

    from torchcram.weights import Masks, Weights

KINDS: dict[str, type[Pruner]] = {kind.kind: kind for kind in (Obs, Wanda, SparseGPT)}
SYNTAX = f"{'@..., '.join(KINDS)}@..., with global:0.9, uniform:0.8, row:0.5 or nm:2:4 after the @"
PRUNERS: Registry[Pruner] = Registry("pruner", "torchcram.pruners", KINDS)
Kind = TypeVar("Kind", bound=type[Pruner])
_INTEGER = re.compile(r"\d+")
_FLOAT = re.compile(r"(\d+\.?\d*|\.\d+)(e-?\d+)?")


def register_pruner(name: str) -> Callable[[Kind], Kind]:
    """Decorates a pruner class so that texts such as "name@global:0.9" stand for its values.

    The class is a frozen dataclass and a subclass of `Pruner`. Its options are fields with a
    default, an int or a float; `letters` names them in the text: with `letters = {"d": "damping"}`
    the text "name:d0.1@global:0.9" sets `damping`. The decorator sets `kind` to `name`. A package
    that announces `name = "package.module"` in the entry-point group "torchcram.pruners" is
    imported when the name is first read.

    Args:
        name: Text before the options and the "@": a letter, then letters, digits, "-" and "_".

    Raises:
        ValueError: If the name is taken, or the class is not as described.
    """

    def register(kind: Kind) -> Kind:
        prefix = f"@register_pruner({name!r}): "
        if not isinstance(kind, type) or not issubclass(kind, Pruner):
            raise ValueError(f"{prefix}{kind!r} is no subclass of Pruner")
        for letter, option in kind.letters.items():
            if len(letter) != 1 or type(getattr(kind, option, None)) not in (int, float):
                raise ValueError(
                    f"{prefix}letters has {letter!r} for {option!r}; allowed is one letter for a "
                    "field whose default is an int or a float"
                )
        PRUNERS.add(name, kind)
        kind.kind = name
        return kind

    return register


def pruner_syntax() -> str:
    """Returns the allowed texts of a pruner, with the names that packages registered."""
    names = PRUNERS.names()
    return SYNTAX + (f"; of other packages: {', '.join(names)}" if names else "")


def parse_pruner(text: str) -> Operator:
    """Reads an operator that may look at data, from its text; the inverse of `str(operator)`.

    Beside pruners, such as "obs@uniform:0.7" or with options "obs:r8:d1e-5@uniform:0.7", it reads
    everything that `parse_operator` reads, also joined by "+".

    Raises:
        ValueError: If the text is not an operator, with the text and what is allowed.
    """
    return parse_joined(text, _parse_part)


def _parse_part(part: str, text: str) -> Operator:
    named, pattern = split_pruner(part)
    if named is None:
        return parse_part(part, text)
    kind, *options = named.split(":")
    try:
        pruner = KINDS.get(kind) or PRUNERS.find(kind)
    except ValueError as error:
        raise ValueError(f"operator {text!r}: {error}") from error
    if pruner is None:
        meant = [f" (did you mean {known}?)" for known in closest(kind, [*KINDS, *PRUNERS.names()])]
        raise ValueError(
            f"operator {text!r}: there is no pruner {kind!r}{''.join(meant[:1])}; "
            f"allowed: {pruner_syntax()}"
        )
    selector = parse_part(pattern, text)
    if not isinstance(selector, Sparsifier):
        raise ValueError(
            f"operator {text!r}: {pattern!r} is no pattern of zeros; allowed: {pruner_syntax()}"
        )
    try:
        return pruner(selector, **_options(pruner, options))
    except ValueError as error:
        raise ValueError(f"operator {text!r}: {error}") from None


def _options(kind: type[Pruner], texts: list[str]) -> dict[str, Any]:
    """Reads options such as "r8": a letter and a number."""
    values: dict[str, Any] = {}
    for text in texts:
        option = kind.letters.get(text[:1])
        read = float if isinstance(getattr(kind, option or "", None), float) else int
        number = (_FLOAT if read is float else _INTEGER).fullmatch(text[1:])
        if option is None or number is None or option in values:
            letters = ", ".join(f"{letter} ({name})" for letter, name in kind.letters.items())
            raise ValueError(
                f"cannot read the option {text!r}; allowed are "
                + (f"each once, with a number behind it: {letters}" if letters else "none")
            )
        values[option] = read(number[0])
    return values


def prune_(
    model: nn.Module,
    operator: Operator | str,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    weights: Weights | None = None,
) -> Masks | None:
    """Compresses `model` in place by an operator that may look at data; returns the masks.

    Args:
        model: Model in any mode; its modes, gradients and running statistics stay unchanged.
        operator: Pruner, any other operator, or text such as "obs@uniform:0.7+int8".
        batches: Batches, as for `bind`.
        loss: Loss function, as for `bind`.
        weights: Weights to compress; by default all `compressible_weights(model)`.
    """
    if isinstance(operator, str):
        operator = parse_pruner(operator)
    return compress_(model, bind(operator, model, batches, loss=loss), weights=weights)
