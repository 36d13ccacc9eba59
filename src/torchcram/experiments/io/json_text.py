"""JSON for what runs leave behind: strict, from and to frozen dataclasses."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torchcram.experiments.io.dataclass_io import UNLESS_DEFAULT, build

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

__all__ = ["UNLESS_DEFAULT", "dump", "parse"]


def parse(kind: type[T], text: str | bytes, where: str) -> T:
    """Makes a `kind` out of JSON that is to have its keys and types exactly.

    Args:
        kind: a dataclass.
        text: of the file.
        where: what it is from, for messages.

    Raises:
        ValueError: naming `where`, the key, what was given and what is allowed.
    """
    try:
        data = json.loads(text, parse_constant=_refuse, object_pairs_hook=_once_each)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    return build(kind, data, where)


def dump(value: DataclassInstance, indent: int | None = 2) -> bytes:
    """Writes a dataclass as JSON, which `parse` reads back.

    Raises:
        ValueError: if a number in it is not finite.
    """
    text = json.dumps(_plain(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return f"{text}\n".encode(errors="surrogatepass")  # for names of files that are no text


def _plain(value: object) -> Any:  # noqa: ANN401
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    pairs = [(field, getattr(value, field.name)) for field in dataclasses.fields(value)]
    return {
        field.name: _plain(found)
        for field, found in pairs
        if field.metadata != UNLESS_DEFAULT or found != field.default
    }


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return found
