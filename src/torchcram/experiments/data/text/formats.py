"""Formats of text datasets: their files, their classes and the metrics that they are scored by."""

from __future__ import annotations

from dataclasses import dataclass

SQUAD = "squad"


@dataclass(frozen=True)
class Sentences:
    """Format of a tsv file with sentences.

    Attributes:
        folder: Name of the folder in the benchmark GLUE.
        columns: Names of the columns that are read, in the order first sentence, second sentence if
            there is one, label; or their numbers if the file has no header.
        labels: Labels as the file has them; the number of a class is an index into them.
        width: Number of columns of a file without a header.
    """

    folder: str
    columns: tuple[str, ...] | tuple[int, ...]
    labels: tuple[str, ...]
    width: int | None = None


@dataclass(frozen=True)
class TextFormat:
    """A dataset format, which is also a task.

    Attributes:
        metric: Name of the metric that counts; its best value is 1.
        others: Names of further metrics that are reported.
        classes: Names of the model's outputs.
        sentences: Format of its files; None for SQuAD's JSON.
        title: Line about the dataset.
    """

    metric: str
    others: tuple[str, ...]
    classes: tuple[str, ...]
    sentences: Sentences | None
    title: str

    @property
    def unit(self) -> str:
        """Plural of what is answered or classified."""
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
