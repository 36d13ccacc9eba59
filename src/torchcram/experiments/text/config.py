"""What recipes about language have of their own."""

from __future__ import annotations

from dataclasses import dataclass

from torchcram.experiments.structure import require, require_one_of
from torchcram.experiments.text.names import is_text_model
from torchcram.experiments.text.tasks import TASKS


@dataclass(frozen=True)
class TextConfig:
    """How texts become tokens; a recipe with this section is about language.

    Attributes:
        task: the format of the data and what it is scored by.
        length: of a sequence in tokens, at most.
        stride: by how many tokens windows on a long paragraph overlap.
    """

    task: str
    length: int = 384
    stride: int = 128

    def __post_init__(self) -> None:
        require_one_of("task", self.task, TASKS)
        require(self.length >= 16, "length", self.length, "at least 16")
        fits = 0 <= self.stride <= self.length // 3
        require(fits, "stride", self.stride, f"from 0 to {self.length // 3}, a third of length")


@dataclass(frozen=True)
class StopConfig:
    """Ends a training once it does not get better; only with texts.

    Attributes:
        held_out: the fraction of the training set that it is tested on meanwhile, and not trained.
        tests: in an epoch, at equal distances; at most one after every batch.
        patience: the tests in a row that may bring nothing better.
    """

    held_out: float = 0.1
    tests: int = 4
    patience: int = 3

    def __post_init__(self) -> None:
        require(0 < self.held_out < 1, "held_out", self.held_out, "between 0 and 1")
        require(self.tests >= 1, "tests", self.tests, "at least 1")
        require(self.patience >= 1, "patience", self.patience, "at least 1")


def require_kind(text: TextConfig | None, model: str) -> None:
    """Refuses a language model without texts, and the other way round.

    Args:
        text: the section of a recipe.
        model: its `model.name`.
    """
    about = "images, as there is no section text"
    if text is not None:
        about = "language, as there is a section text"
    right = is_text_model(model) == (text is not None)
    require(right, "model.name", model, f"a model for {about}")
