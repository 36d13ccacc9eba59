"""Reads sentences and their labels from the tsv files of GLUE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torchcram.experiments.data.text.formats import Sentences


@dataclass(frozen=True)
class Labelled:
    """Sentences of a file, with labels.

    Attributes:
        first: Sentences, or first sentences of pairs.
        second: Second sentences of the pairs; None if the task is about single sentences.
        labels: Numbers of the classes.
        skipped: Number of lines left out because of other columns or another label.
    """

    first: tuple[str, ...]
    second: tuple[str, ...] | None
    labels: tuple[int, ...]
    skipped: int = 0


def read_tsv(content: bytes, where: str, *, sentences: Sentences) -> Labelled:
    """Reads a tsv file; quotes have no special meaning in it.

    Args:
        content: Content of the file.
        where: Name of the file for error messages.
        sentences: Format of the file.

    Raises:
        ValueError: If the file is not UTF-8, a column is missing, or no line can be used.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8: {error}") from None
    # not splitlines(), which also splits at characters that occur inside sentences
    lines = [line.removesuffix("\r").split("\t") for line in text.split("\n")]
    lines = [line for line in lines if line != [""]]
    if not lines:
        raise ValueError(f"{where} is empty")
    width = sentences.width
    if width is None:
        header = [name.strip() for name in lines.pop(0)]
        width, numbers = len(header), _numbers(header, sentences, where)
    else:
        numbers = [int(number) for number in sentences.columns]
    kept = [line for line in lines if len(line) == width and line[numbers[-1]] in sentences.labels]
    if not kept:
        allowed = f"{width} columns, the label one of {', '.join(sentences.labels)}"
        raise ValueError(f"{where} has no usable line out of {len(lines)}; allowed: {allowed}")
    columns = [tuple(line[number].strip() for line in kept) for number in numbers]
    return Labelled(
        first=columns[0],
        second=columns[1] if len(columns) == 3 else None,
        labels=tuple(sentences.labels.index(line[numbers[-1]]) for line in kept),
        skipped=len(lines) - len(kept),
    )


def _numbers(header: Sequence[str], sentences: Sentences, where: str) -> list[int]:
    """Returns the numbers of the columns that are read."""
    missing = [str(name) for name in sentences.columns if name not in header]
    if missing:
        raise ValueError(
            f"{where} has no column {' and no '.join(map(repr, missing))}; it has: "
            f"{', '.join(map(repr, header))}"
        )
    return [header.index(str(name)) for name in sentences.columns]
