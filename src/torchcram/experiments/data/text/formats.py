"""Formats of text datasets: their files, their classes and the metrics that they are scored by."""

from __future__ import annotations

from dataclasses import dataclass

SQUAD = "squad"


@dataclass(frozen=True)
class Sentences:
    """The format of a tsv file.

    Attributes:
        folder: in which the benchmark GLUE has it.
        columns: names of those that are read, in the order first sentence, second, label; or their
            places where the file has no header.
        labels: as the file has them; the number of a class is a place here.
        width: how many columns a file without a header has.
    """

    folder: str
    columns: tuple[str, ...] | tuple[int, ...]
    labels: tuple[str, ...]
    width: int | None = None


@dataclass(frozen=True)
class TextFormat:
    """A dataset format, which is also a task.

    Attributes:
        metric: that counts, from 0 to 1; the more the better.
        others: that are told beside it.
        classes: names of what a model gives scores for.
        sentences: the format of its files; None for SQuAD's JSON.
        title: a line on it.
    """

    metric: str
    others: tuple[str, ...]
    classes: tuple[str, ...]
    sentences: Sentences | None
    title: str

    @property
    def unit(self) -> str:
        """What is answered or classified, in the plural."""
        return "questions" if self.sentences is None else "sentences"


BINARY = ("0", "1")
TEXT_FORMATS = {
    SQUAD: TextFormat(
        "F1",
        ("exact match",),
        ("start", "end"),
        None,
        "SQuAD v1.1: answers to questions are spans of a paragraph (train*.json, dev*.json)",
    ),
    "sst2": TextFormat(
        "accuracy",
        (),
        ("negative", "positive"),
        Sentences("SST-2", ("sentence", "label"), BINARY),
        "SST-2 of GLUE: is a sentence of a film review positive (train.tsv, dev.tsv)",
    ),
    "mrpc": TextFormat(
        "accuracy",
        ("F1",),
        ("different", "equivalent"),
        Sentences("MRPC", ("#1 String", "#2 String", "Quality"), BINARY),
        "MRPC of GLUE: do two sentences say the same (train.tsv, dev.tsv)",
    ),
    "rte": TextFormat(
        "accuracy",
        (),
        ("entailment", "not_entailment"),
        Sentences("RTE", ("sentence1", "sentence2", "label"), ("entailment", "not_entailment")),
        "RTE of GLUE: does the second sentence follow from the first (train.tsv, dev.tsv)",
    ),
    "cola": TextFormat(
        "Matthews correlation",
        ("accuracy",),
        ("unacceptable", "acceptable"),
        Sentences("CoLA", (3, 1), BINARY, width=4),
        "CoLA of GLUE: is a sentence grammatical (train.tsv, dev.tsv)",
    ),
}
