"""JSON for what runs leave behind: strict, from and to frozen dataclasses."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from torchcram.experiments.structure import build

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")


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
    text = json.dumps(asdict(value), indent=indent, allow_nan=False, ensure_ascii=False)
    return f"{text}\n".encode(errors="surrogatepass")  # for names of files that are no text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} appears twice")
    return found
