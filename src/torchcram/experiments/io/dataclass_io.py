"""Plain data, as YAML and JSON give it, to frozen dataclasses and back; strictly.

Fields are str, int, float, bool, Any, another dataclass, `X | None`, `tuple[X, ...]` or
`dict[str, X]`.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")

UNLESS_DEFAULT = {
    "written": "unless default"
}  # metadata of a field that is left out at its default
SHOWN = 80  # characters of a wrong value that a message repeats


class BadValue(ValueError):  # noqa: N818
    """Something is not allowed where it stands.

    Args:
        key: where, as dotted names.
        problem: what is wrong, to be read after the key.
        allowed: what would be right.
    """

    def __init__(self, key: str, problem: str, allowed: str) -> None:
        super().__init__(key, problem, allowed)
        self.key, self.problem, self.allowed = key, problem, allowed

    def __str__(self) -> str:
        return f"{self.key} {self.problem}; allowed: {self.allowed}"


def build(kind: type[T], data: object, where: str) -> T:
    """Makes a `kind` out of `data`, which is to have its keys and types exactly.

    Args:
        kind: a dataclass. Its `__post_init__` refuses values by raising `BadValue`.
        data: a mapping; sections of dataclasses are mappings in turn, tuples are lists.
        where: what the data is from, a file say, for messages.

    Raises:
        ValueError: naming `where`, the key, what was given and what is allowed.
    """
    try:
        return cast(T, _section(kind, data, ""))
    except BadValue as error:
        raise ValueError(f"{where}: {error}") from None


def plain(value: object) -> Any:  # noqa: ANN401
    """Returns a dataclass as what `build` makes it from: mappings, lists and scalars."""
    if dataclasses.is_dataclass(value):
        pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
        return {
            field.name: plain(found)
            for field, found in pairs
            if field.metadata != UNLESS_DEFAULT or found != field.default
        }
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def require(holds: bool, key: str, given: object, allowed: str) -> None:
    """Raises `BadValue` unless `holds`."""
    if not holds:
        raise BadValue(key, f"is {shown(given)}", allowed)


def require_one_of(key: str, given: str, allowed: Iterable[str]) -> None:
    """Raises `BadValue` unless `given` is among `allowed`."""
    names = list(allowed)
    if given not in names:
        problem = f"is {shown(given)}{did_you_mean(given, names)}"
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


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """Returns a question that names the one of `names` most like `given`, or an empty text."""
    close = difflib.get_close_matches(given, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(given: object) -> str:
    """Returns `given` for a message, cut if it is long."""
    text = repr(given)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _section(kind: Any, given: object, key: str) -> object:  # noqa: ANN401
    hints = get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if not isinstance(given, Mapping):
        allowed = f"a section with the keys {', '.join(fields)}"
        raise BadValue(key or "the whole", f"is {shown(given)}", allowed)
    for name in given:
        if name not in fields:
            problem = f"is no known key{did_you_mean(str(name), fields)}"
            raise BadValue(_under(key, str(name)), problem, ", ".join(fields))
    values = {}
    for name, field in fields.items():
        if name in given:
            values[name] = _value(hints[name], given[name], _under(key, name))
        elif field.default is field.default_factory is dataclasses.MISSING:
            raise BadValue(_under(key, name), "is missing", _described(hints[name]))
    try:
        return kind(**values)
    except BadValue as error:
        raise BadValue(_under(key, error.key), error.problem, error.allowed) from None


def _value(kind: Any, given: object, key: str) -> object:  # noqa: ANN401
    if dataclasses.is_dataclass(kind):
        return _section(kind, given, key)
    inner = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        return None if given is None else _value(_without_none(inner), given, key)
    if get_origin(kind) is tuple:
        require(isinstance(given, (list, tuple)), key, given, _described(kind))
        items = enumerate(cast("list[object]", given))
        return tuple(_value(inner[0], item, f"{key}[{place}]") for place, item in items)
    if get_origin(kind) is dict:
        require(isinstance(given, Mapping), key, given, _described(kind))
        pairs = cast("Mapping[object, object]", given).items()
        return {_value(str, name, key): _value(inner[1], v, f"{key}.{name}") for name, v in pairs}
    accepts, allowed = _SCALARS[kind]
    require(accepts(given), key, given, allowed)
    return float(cast(float, given)) if kind is float else given


def _described(kind: Any) -> str:  # noqa: ANN401
    """Says what a field of this type may hold."""
    if dataclasses.is_dataclass(kind):
        return f"a section with the keys {', '.join(f.name for f in dataclasses.fields(kind))}"
    if get_origin(kind) in (Union, types.UnionType):
        return f"{_described(_without_none(get_args(kind)))}, or null"
    if get_origin(kind) is tuple:
        return f"a list, of which each is {_described(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a section, of which each is {_described(get_args(kind)[1])}"
    return _SCALARS[kind][1]


def _without_none(kinds: tuple[Any, ...]) -> Any:  # noqa: ANN401
    (kind,) = (kind for kind in kinds if kind is not type(None))
    return kind


def _under(section: str, key: str) -> str:
    return f"{section}.{key}" if section else key


def _is_integer(given: object) -> bool:
    return isinstance(given, int) and not isinstance(given, bool)


def _is_number(given: object) -> bool:
    if not isinstance(given, (int, float)) or isinstance(given, bool):
        return False
    try:
        return math.isfinite(given)
    except OverflowError:  # an integer beyond all floats
        return False


_SCALARS: dict[Any, tuple[Callable[[object], bool], str]] = {
    bool: (lambda given: isinstance(given, bool), "true or false"),
    int: (_is_integer, "an integer"),
    float: (_is_number, "a finite number"),
    str: (lambda given: isinstance(given, str), "a text"),
    Any: (lambda _: True, "anything"),
}
