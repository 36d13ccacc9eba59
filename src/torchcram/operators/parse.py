"""Operators as text, with the registry of operators of other packages."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torchcram.operators.base import Operator
from torchcram.operators.chain import join
from torchcram.operators.nm import NM
from torchcram.operators.quantize import Quantize
from torchcram.operators.topk import GlobalTopK, RowTopK, UniformTopK

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

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
    """Returns the allowed texts of an operator, with the names that packages registered."""
    names = OPERATORS.names()
    return SYNTAX + (f"; of other packages: {', '.join(names)}" if names else "")


def parse_operator(text: str) -> Operator:
    """Reads an operator from its text; the inverse of `str(operator)`.

    Operators of other packages are read too; see `register_operator`.

    Raises:
        ValueError: If the text is not an operator, with the text and what is allowed.
    """
    return parse_joined(text, parse_part)


def parse_joined(text: str, read: Callable[[str, str], Operator]) -> Operator:
    """Reads operators joined by "+"; `read` gets each part, and the whole text for errors."""
    return join([read(part.strip(), text) for part in text.split("+")])


def as_operator(operator: Operator | str) -> Operator:
    """Returns an operator, read from its text if necessary."""
    if isinstance(operator, str):
        return parse_operator(operator)
    if not isinstance(operator, Operator):
        raise ValueError(
            f"{operator!r} is neither an Operator nor text such as: {operator_syntax()}"
        )
    return operator


def parse_part(part: str, text: str) -> Operator:
    """Reads `part`, one operator of `text`."""
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
    """Returns the allowed words that a misspelled word may stand for, the likeliest first."""
    return difflib.get_close_matches(word.lower(), allowed, cutoff=0.5)


def _read(part: str) -> Operator | None:
    """Reads one operator; returns None if the text has the form of no operator."""
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
    """Returns a suggestion with the misspelled word corrected; empty if there is none."""
    word = re.match(r"[^\W\d_]*", part)
    assert word is not None  # noqa: S101  it also matches the empty text
    name, colon, rest = part.partition(":")
    corrected = [kind + part[word.end() :] for kind in closest(word[0], _WORDS)]
    corrected += [kind + colon + rest for kind in closest(name, OPERATORS.names())]
    for text in corrected:
        with suppress(ValueError):
            if _read(text) is not None:
                return f" (did you mean {text}?)"
    return ""


def split_pruner(part: str) -> tuple[str | None, str]:
    """Splits the text of one operator into pruner and pattern.

    "obs:m64@global:0.9" gives "obs:m64" and "global:0.9"; without a pruner the first is None.
    """
    pruner, at, pattern = part.partition("@")
    return (pruner, pattern) if at else (None, part)


def parse_without_pruners(text: str) -> Operator:
    """Reads a text without the pruners in it.

    From "obs:m64@nm:2:4+int8" it reads nm:2:4+int8, which determines the zeros and values of
    compressed weights whatever the pruner.

    Raises:
        ValueError: If the text is not an operator, with the text and what is allowed.
    """
    return parse_joined(text, lambda part, whole: parse_part(split_pruner(part)[1], whole))


T = TypeVar("T")
Kind = TypeVar("Kind", bound=type[Operator])

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_INTEGERS = re.compile(r"int\d*")  # names of quantizers
DENSE = "dense"  # in lists of targets: no compression


class Registry(Generic[T]):
    """Classes of other packages by name, such as operators by what their texts begin with.

    A package announces a name by an entry point, which is loaded when a text first uses the name.
    The module that the entry point refers to registers the class with the decorator.

    Attributes:
        noun: Noun for messages, such as "operator".
        group: Entry-point group in which packages announce their names.
        reserved: Names that the library uses itself.
        frozen: Whether the classes must be frozen dataclasses.
        kinds: Registered classes by name.
    """

    def __init__(
        self, noun: str, group: str, reserved: Collection[str], *, frozen: bool = True
    ) -> None:
        self.noun, self.group, self.reserved = noun, group, frozenset(reserved)
        self.frozen = frozen
        self.kinds: dict[str, type[T]] = {}

    def add(self, name: str, kind: type[T]) -> None:
        """Registers a class; the same class defined anew, as in a notebook, replaces itself.

        Raises:
            ValueError: If the name is taken or malformed, or `kind` is not a frozen dataclass and
                must be one.
        """
        if not _NAME.fullmatch(name):
            raise ValueError(
                f"{self.noun} name {name!r}: allowed is a letter, then letters, digits, '-' and '_'"
            )
        if name in self.reserved or _INTEGERS.fullmatch(name):
            raise ValueError(f"{self.noun} name {name!r} is taken by torchcram itself")
        known = self.kinds.get(name)
        if known is not None and _path(known) != _path(kind):
            raise ValueError(
                f"{self.noun} name {name!r} is taken by {_path(known)}; {_path(kind)} needs another"
            )
        frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        if self.frozen and not frozen:
            raise ValueError(
                f"{_path(kind)} must be a frozen dataclass: put @register_{self.noun}({name!r}) "
                "above @dataclass(frozen=True)"
            )
        self.kinds[name] = kind

    def names(self) -> list[str]:
        """Returns the registered and the announced names, without importing any package."""
        announced = (point.name for point in _entry_points(self.group, tuple(sys.path)))
        return sorted({*self.kinds, *announced} - self.reserved)

    def find(self, name: str) -> type[T] | None:
        """Returns the class of a name, importing the package that announces it; None if unknown.

        Raises:
            ValueError: If several packages announce the name, or the package cannot be imported;
                the message names the packages.
        """
        if name in self.reserved:
            return None
        if name not in self.kinds:
            points = [p for p in _entry_points(self.group, tuple(sys.path)) if p.name == name]
            if len(points) > 1:
                packages = " and ".join(_package(point) for point in points)
                raise ValueError(f"{self.noun} {name!r} is announced by {packages}: keep one")
            for point in points:
                self._load(point)
        return self.kinds.get(name)

    def _load(self, point: EntryPoint) -> None:
        source = f"{self.noun} {point.name!r} of {_package(point)} ({point.value})"
        try:
            point.load()
        except Exception as error:
            raise ValueError(
                f"{source} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if point.name not in self.kinds:
            raise ValueError(
                f"{source} was imported, but nothing there is decorated with "
                f"@register_{self.noun}({point.name!r})"
            )


OPERATORS: Registry[Operator] = Registry(
    "operator", "torchcram.operators", ("global", "uniform", "row", "nm", "int", DENSE)
)


def register_operator(name: str) -> Callable[[Kind], Kind]:
    """Decorates an operator class so that texts such as "name:0.75" stand for its values.

    The class is a frozen dataclass with a classmethod `from_text`, which makes an operator from
    the text after the colon, and a `__str__` that returns the whole text; they are inverse. The
    text works wherever those of the built-in operators do: `parse_operator`, recipes, the command
    line, compact files. A package that announces `name = "package.module"` in the entry-point group
    "torchcram.operators" is imported when the name is first read::

        @register_operator("blocks")
        @dataclass(frozen=True)
        class Blocks(Sparsifier):
            sparsity: float

            @classmethod
            def from_text(cls, text):
                return cls(float(text))

            def __str__(self):
                return f"blocks:{self.sparsity}"

    Args:
        name: Text before the colon: a letter, then letters, digits, "-" and "_".

    Raises:
        ValueError: If the name is taken, or the class is not as described.
    """

    def register(kind: Kind) -> Kind:
        if not isinstance(kind, type) or not issubclass(kind, Operator):
            raise ValueError(f"@register_operator({name!r}): {kind!r} is no subclass of Operator")
        if not callable(getattr(kind, "from_text", None)):
            raise ValueError(
                f"@register_operator({name!r}): {_path(kind)} needs a classmethod from_text(text), "
                "which makes an operator from the text after the colon"
            )
        OPERATORS.add(name, kind)
        return kind

    return register


def read_registered(part: str) -> Operator | None:
    """Reads the text of a registered operator; returns None if its name is unknown.

    Raises:
        ValueError: If the operator refuses the text, or `from_text` and `str` are not inverse.
    """
    name, _, rest = part.partition(":")
    kind = OPERATORS.find(name) if _NAME.fullmatch(name) else None
    if kind is None:
        return None
    operator = _from_text(kind, rest)
    text = str(operator)
    prefix, _, again = text.partition(":")
    if prefix != name or set(text) & {"+", "@"} or _from_text(kind, again) != operator:
        raise ValueError(
            f"{_path(kind)}: from_text and str are not inverse, as str({operator!r}) is {text!r}"
        )
    return operator


def _from_text(kind: type[Operator], text: str) -> Operator:
    operator = kind.from_text(text)  # type: ignore[attr-defined]
    if not isinstance(operator, kind):
        raise ValueError(f"{_path(kind)}.from_text({text!r}) returned {operator!r}")
    return operator


@functools.lru_cache(maxsize=8)
def _entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:  # noqa: ARG001
    """Returns the entry points of a group, which are read again when `sys.path` changes."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
