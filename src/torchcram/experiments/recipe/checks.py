"""Checks of values in recipes: operators, names of classes, and their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torchcram import Operator, parse_operator
from torchcram.experiments.io.dataclass_io import BadValue, did_you_mean, require_plain, shown
from torchcram.operators.parse import operator_syntax
from torchcram.pruners import parse_pruner
from torchcram.pruners.parse import pruner_syntax


def read_operators(
    key: str, texts: tuple[str, ...], read: Callable[[str], Operator] = parse_operator
) -> list[Operator]:
    """Returns the operators of a list, as `read_operator` does."""
    return [read_operator(f"{key}[{index}]", text, read) for index, text in enumerate(texts)]


def read_operator(
    key: str, text: str, read: Callable[[str], Operator] = parse_operator
) -> Operator:
    """Returns the operator that a text stands for.

    Args:
        key: Key of the text, for the message.
        text: Text of the operator.
        read: Function that parses it; `parse_pruner` allows pruners too.

    Raises:
        BadValue: If the text is not an operator; it names what is allowed.
    """
    try:
        return read(text)
    except ValueError as error:
        problem, _, own = str(error).removeprefix(f"operator {text!r}: ").partition("; allowed")
        also = f"; {pruner_syntax()}" if read is parse_pruner else ""
        # what an operator allows itself is more to the point than all operators that there are
        allowed = own.removeprefix(" are ") if own.startswith(" are ") else operator_syntax() + also
        raise BadValue(key, f"is {text!r}: {problem}", allowed) from None


def require_torch_name(
    key: str, value: str, ours: Sequence[str], theirs: Mapping[str, type]
) -> None:
    """Raises `BadValue` unless a value is a name of ours or of a class of torch."""
    if value in ours or value in theirs:
        return
    meant = did_you_mean(value, ours)
    alike = [name for name in theirs if name.lower() == value.lower()]
    if alike and not meant:
        meant = f" (did you mean {alike[0]!r}?)"
    allowed = f"{', '.join(ours)}, or of torch: {', '.join(theirs)}"
    raise BadValue(key, f"is {shown(value)}{meant}", allowed)


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
