"""Sentences and their labels, out of the tsv files of GLUE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchcram.experiments.data.text.formats import Sentences


@dataclass(frozen=True)
class Labelled:
    """What a file holds.

    Attributes:
        first: the sentences.
        second: their partners, as many; None where a task is about single sentences.
        labels: numbers of their classes.
        skipped: lines that were left out, with another number of columns or another label.
    """

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: tuple[int, ...]
    skipped: int = 0


def read_tsv(content: bytes, where: str, *, sentences: Sentences) -> Labelled:
    """Reads a file; quotes in it are characters as any other.

    Args:
        content: of the file.
        where: it is from, for messages.
        sentences: its format.

    Raises:
        ValueError: if it is not UTF-8, a column is missing, or no line is left.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from None
    # not splitlines(), which knows line ends that sentences have inside
    lines = [line.removesuffix("\r").split("\t") for line in text.split("\n")]
    lines = [line for line in lines if line != [""]]
    if not lines:
        raise ValueError(f"{where} is empty")
    width = sentences.width
    if width is None:
        header = [name.strip() for name in lines.pop(0)]
        width, places = len(header), _places(header, sentences, where)
    else:
        places = [int(place) for place in sentences.columns]
    kept = [line for line in lines if len(line) == width and line[places[-1]] in sentences.labels]
    if not kept:
        allowed = f"{width} columns, the label one of {', '.join(sentences.labels)}"
        raise ValueError(f"{where} has no line to use out of {len(lines)}; needed: {allowed}")
    columns = [tuple(line[place].strip() for line in kept) for place in places]
    return Labelled(
        first=columns[0],
        second=columns[1] if len(columns) == 3 else None,
        labels=tuple(sentences.labels.index(line[places[-1]]) for line in kept),
        skipped=len(lines) - len(kept),
    )


def _places(header: Sequence[str], sentences: Sentences, where: str) -> list[int]:
    missing = [str(name) for name in sentences.columns if name not in header]
    if missing:
        raise ValueError(
            f"{where} has no column {' and no '.join(map(repr, missing))}; it has: "
            f"{', '.join(map(repr, header))}"
        )
    return [header.index(str(name)) for name in sentences.columns]
