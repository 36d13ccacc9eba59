"""Operators and pruners of other packages, by name: registered by a decorator or an entry point."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Collection
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from torchcram.operators.base import Operator

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
Kind = TypeVar("Kind", bound=type[Operator])

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_INTEGERS = re.compile(r"int\d*")  # int4 and its like are quantizers
DENSE = "dense"  # where targets are listed: no compression


class Registry(Generic[T]):
    """Classes by the name that their texts begin with.

    A package announces a name by an entry point, which is loaded when a text first has that name;
    the module that it names registers the class by the decorator.

    Attributes:
        noun: What is registered, for messages: "operator".
        group: Entry-point group in which packages announce their names.
        reserved: Names that the library uses itself.
        kinds: Registered classes by name.
    """

    def __init__(self, noun: str, group: str, reserved: Collection[str]) -> None:
        self.noun, self.group, self.reserved = noun, group, frozenset(reserved)
        self.kinds: dict[str, type[T]] = {}

    def add(self, name: str, kind: type[T]) -> None:
        """Registers a class; the same class defined anew, as in a notebook, replaces itself.

        Raises:
            ValueError: If the name is taken or malformed, or `kind` is no frozen dataclass.
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
        if not frozen:
            raise ValueError(
                f"{_path(kind)} must be a frozen dataclass: put @register_{self.noun}({name!r}) "
                "above @dataclass(frozen=True)"
            )
        self.kinds[name] = kind

    def names(self) -> list[str]:
        """Returns the registered and the announced names; no package is imported."""
        announced = (point.name for point in _entry_points(self.group, tuple(sys.path)))
        return sorted({*self.kinds, *announced} - self.reserved)

    def find(self, name: str) -> type[T] | None:
        """Returns the class of a name, imported from the package that announces it; or None.

        Raises:
            ValueError: If several packages announce the name, or theirs cannot be imported; names
                the package.
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
        says = f"{self.noun} {point.name!r} of {_package(point)} ({point.value})"
        try:
            point.load()
        except Exception as error:
            raise ValueError(
                f"{says} cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if point.name not in self.kinds:
            raise ValueError(
                f"{says} was imported, but nothing there is decorated with "
                f"@register_{self.noun}({point.name!r})"
            )


OPERATORS: Registry[Operator] = Registry(
    "operator", "torchcram.operators", ("global", "uniform", "row", "nm", "int", DENSE)
)


def register_operator(name: str) -> Callable[[Kind], Kind]:
    """Decorates an operator class so that texts such as "name:0.75" stand for its values.

    The class is a frozen dataclass with a classmethod `from_text`, which makes an operator from
    what follows the colon, and a `__str__` that gives the whole text; they are inverse. The text
    works wherever those of the built-in operators do: `parse_operator`, recipes, the command line,
    compact files. A package that announces `name = "package.module"` in the entry-point group
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
        ValueError: If the name is taken, by whom, or the class lacks something.
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
    """Reads the text of one registered operator; None where its name is not known.

    Raises:
        ValueError: If the operator refuses the text, or text and operator are not inverse.
    """
    name, _, rest = part.partition(":")
    kind = OPERATORS.find(name) if _NAME.fullmatch(name) else None
    if kind is None:
        return None
    operator = _from_text(kind, rest)
    text = str(operator)
    begins, _, again = text.partition(":")
    if begins != name or set(text) & {"+", "@"} or _from_text(kind, again) != operator:
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
    """Returns the entry points of a group; read anew when `sys.path` changes."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=group))


def _package(point: EntryPoint) -> str:
    return f"{point.dist.name} {point.dist.version}" if point.dist else point.value


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
