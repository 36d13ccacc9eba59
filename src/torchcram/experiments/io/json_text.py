"""Strict JSON for the records of runs, from and to frozen dataclasses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torchcram.experiments.io.dataclass_io import UNLESS_DEFAULT, build, plain

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

__all__ = ["UNLESS_DEFAULT", "dump", "parse"]


def parse(kind: type[T], text: str | bytes, where: str) -> T:
    """Builds a dataclass from JSON that has exactly its keys and types.

    Args:
        kind: Dataclass to build.
        text: JSON text.
        where: Origin of the text, such as a file name, for messages.

    Raises:
        ValueError: If the text is not JSON, or a key or a value is not allowed; the message names
            `where`, the key, what was given and what is allowed.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    return build(kind, data, where)


def dump(value: DataclassInstance, indent: int | None = 2) -> bytes:
    """Writes a dataclass as JSON that `parse` reads back.

    Args:
        value: Dataclass to write.
        indent: Number of spaces for each level of nesting; None writes one line.

    Raises:
        ValueError: If a number in it is not finite.
    """
    text = json.dumps(plain(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return f"{text}\n".encode(errors="surrogatepass")  # file names may hold lone surrogates


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    section: dict[str, Any] = {}
    for key, value in pairs:
        if key in section:
            raise ValueError(f"the key {key!r} appears twice")
        section[key] = value
    return section
