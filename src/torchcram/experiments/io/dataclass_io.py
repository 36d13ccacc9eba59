"""Strict conversion between frozen dataclasses and plain data as YAML and JSON have it.

A field may be a str, int, float, bool, Any, another dataclass, `X | None`, `tuple[X, ...]` or
`dict[str, X]`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

UNLESS_DEFAULT = {"written": "unless default"}
"""Metadata of a field that `plain` leaves out where it has its default value."""

_LONGEST = 80  # characters of a wrong value that a message repeats


class BadValue(ValueError):  # noqa: N818
    """A value that is not allowed, or a key.

    Args:
        key: Dotted name of the key.
        problem: Phrase that follows the key in the message: "is -1".
        allowed: Description of the allowed values: "at least 0".
    """

    def __init__(self, key: str, problem: str, allowed: str) -> None:
        super().__init__(key, problem, allowed)
        self.key, self.problem, self.allowed = key, problem, allowed

    def __str__(self) -> str:
        return f"{self.key} {self.problem}; allowed: {self.allowed}"


def build(kind: type[T], data: object, where: str) -> T:
    """Builds a dataclass from a mapping that has exactly its keys and types.

    Args:
        kind: Dataclass to build. Its `__post_init__` refuses values by raising `BadValue`.
        data: Mapping of its fields; dataclasses in it are mappings too, tuples are lists.
        where: Origin of the data, such as a file name, for messages.

    Raises:
        ValueError: If a key or a value is not allowed; the message names `where`, the key, what was
            given and what is allowed.
    """
    try:
        return cast(T, _section(kind, data, ""))
    except BadValue as error:
        raise ValueError(f"{where}: {error}") from None


def build_section(kind: type[T], data: object, key: str) -> T:
    """Builds a dataclass as `build` does, out of the section `key` of a document.

    Raises:
        BadValue: If a key or a value is not allowed.
    """
    return cast(T, _section(kind, data, key))


def plain(value: object) -> Any:  # noqa: ANN401
    """Returns a dataclass as mappings, lists and scalars, from which `build` makes it again."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    items = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return {
        field.name: plain(item)
        for field, item in items
        if field.metadata != UNLESS_DEFAULT or item != field.default
    }


def require(holds: bool, key: str, value: object, allowed: str) -> None:
    """Raises `BadValue` unless a condition holds.

    Args:
        holds: Condition.
        key: Dotted name of the key.
        value: Value of the key, for the message.
        allowed: Description of the allowed values.
    """
    if not holds:
        raise BadValue(key, f"is {shown(value)}", allowed)


def require_absent(value: object, key: str, allowed: str) -> None:
    """Raises `BadValue` unless a section is None.

    Args:
        value: Section.
        key: Dotted name of the section.
        allowed: Reason for which it has to be absent: "null, as ...".
    """
    if value is not None:
        raise BadValue(key, "is given", allowed)


def require_one_of(key: str, value: str, allowed: Iterable[str]) -> None:
    """Raises `BadValue` unless a value is one of those allowed."""
    names = list(allowed)
    if value not in names:
        problem = f"is {shown(value)}{did_you_mean(value, names)}"
        raise BadValue(key, problem, ", ".join(names))


def require_pattern(key: str, pattern: str | None) -> None:
    """Raises `BadValue` unless `pattern` is a regular expression or None."""
    try:
        re.compile(pattern or "")
    except re.error as error:
        raise BadValue(key, f"is {pattern!r}: {error}", "a regular expression, or null") from None


def require_plain(key: str, args: Mapping[str, Any]) -> None:
    """Raises `BadValue` unless arguments are what YAML and JSON write alike."""
    try:
        same = json.loads(json.dumps(args, allow_nan=False)) == args
    except (TypeError, ValueError):
        same = False
    allowed = "texts, finite numbers, true, false, null, and lists and sections of them"
    require(same, key, args, allowed)


def did_you_mean(text: str, names: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" with the name most similar to a text, or an empty text."""
    close = difflib.get_close_matches(text, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: object) -> str:
    """Returns a value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def _section(kind: Any, data: object, key: str) -> object:  # noqa: ANN401
    """Builds the dataclass `kind` from the mapping `data`, which is at the dotted name `key`."""
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(data, Mapping):
        given = "empty" if data is None and not key else shown(data)
        raise BadValue(key or "the document", f"is {given}", _described(kind))
    for name in data:
        if name not in fields:
            paths = [_under(key, path) for path in _paths(kind) if path.endswith(f".{name}")]
            meant = f" (did you mean {' or '.join(map(repr, paths))}?)"
            if not paths:
                meant = did_you_mean(str(name), fields)
            problem = f"is no known key{meant}"
            raise BadValue(_under(key, str(name)), problem, ", ".join(fields))
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], _under(key, name))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise BadValue(_under(key, name), "is missing", _described(hints[name]))
    try:
        return kind(**values)
    except BadValue as error:
        raise BadValue(_under(key, error.key), error.problem, error.allowed) from None


def _paths(kind: Any) -> Iterator[str]:  # noqa: ANN401
    """Yields the dotted names of all keys below a dataclass."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        yield field.name
        for part in (hints[field.name], *get_args(hints[field.name])):
            if dataclasses.is_dataclass(part):
                yield from (_under(field.name, path) for path in _paths(part))


def _value(kind: Any, value: object, key: str) -> object:  # noqa: ANN401
    """Returns a value as the type `kind` of its field has it."""
    if dataclasses.is_dataclass(kind):
        return _section(kind, value, key)
    inner = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return None if value is None else _value(_without_none(inner), value, key)
    if get_origin(kind) is tuple:
        require(isinstance(value, (list, tuple)), key, value, _described(kind))
        items = enumerate(cast("list[object]", value))
        return tuple(_value(inner[0], item, f"{key}[{index}]") for index, item in items)
    if get_origin(kind) is dict:
        require(isinstance(value, Mapping), key, value, _described(kind))
        pairs = cast("Mapping[object, object]", value).items()
        return {_value(str, name, key): _value(inner[1], v, f"{key}.{name}") for name, v in pairs}
    accepts, allowed = _SCALARS[kind]
    require(accepts(value), key, value, allowed)
    return float(cast(float, value)) if kind is float else value


def _described(kind: Any) -> str:  # noqa: ANN401
    """Describes the values that a field of a type may have."""
    if dataclasses.is_dataclass(kind):
        names = ", ".join(field.name for field in dataclasses.fields(kind))
        return f"a section with the keys {names}"
    if get_origin(kind) in (Union, types.UnionType):
        return f"{_described(_without_none(get_args(kind)))}, or null"
    if get_origin(kind) is tuple:
        return f"a list in which each item is {_described(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a section in which each value is {_described(get_args(kind)[1])}"
    return _SCALARS[kind][1]


def _without_none(kinds: tuple[Any, ...]) -> Any:  # noqa: ANN401
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return kind


def _under(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


_SCALARS: dict[Any, tuple[Callable[[object], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (_is_integer, "an integer"),
    float: (_is_number, "a finite number"),
    str: (lambda value: isinstance(value, str), "a text"),
    Any: (lambda _: True, "anything"),
}
