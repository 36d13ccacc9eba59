"""Tasks: data, model, loss and metric of one kind of problem each; one file per kind.

A package adds a task by `register_task` and an entry point in the group "torchcram.tasks".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from torchcram.experiments.data.text.formats import SQUAD
from torchcram.experiments.io.dataclass_io import require_one_of, require_plain
from torchcram.experiments.tasks.base import (
    ACCURACY,
    Batches,
    Dataset,
    Score,
    Task,
    autocast,
)
from torchcram.experiments.tasks.images import ImageClassification
from torchcram.experiments.tasks.language_modelling import LanguageModelling
from torchcram.experiments.tasks.question_answering import QuestionAnswering
from torchcram.experiments.tasks.sentence_classification import SentenceClassification
from torchcram.experiments.tasks.tensors import TensorData, TensorSplit, TensorTask
from torchcram.operators.parse import Registry

if TYPE_CHECKING:
    from torchcram.experiments.data.config import DataConfig, TextConfig
    from torchcram.experiments.models.config import ModelConfig

__all__ = [
    "ACCURACY",
    "Batches",
    "Dataset",
    "ImageClassification",
    "LanguageModelling",
    "QuestionAnswering",
    "Score",
    "SentenceClassification",
    "Task",
    "TaskConfig",
    "TensorData",
    "TensorSplit",
    "TensorTask",
    "autocast",
    "build_task",
    "register_task",
]

IMAGES, TEXTS, LANGUAGE = "image-classification", "texts", "language-modelling"
TASKS: Registry[Task] = Registry("task", "torchcram.tasks", (IMAGES, TEXTS))
Kind = TypeVar("Kind", bound=type[Task])


@dataclass(frozen=True)
class TaskConfig:
    """Section `task`: language modelling or a task of another package, in place of other tasks.

    Attributes:
        name: Name that the task is registered by.
        args: Settings of the task.
    """

    name: str
    args: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if TASKS.find(self.name) is None:
            names = TASKS.names() or ["none: no installed package announces a task"]
            require_one_of("name", self.name, names)
        require_plain("args", self.args)


def register_task(name: str) -> Callable[[Kind], Kind]:
    """Decorates a frozen dataclass derived from `Task` so that recipes can name it.

    A recipe with `task: {name: NAME, args: {...}}` uses the class. A package that announces
    `NAME = "package.module"` in the entry-point group "torchcram.tasks" is imported when a recipe
    first has that name.

    Args:
        name: Name of the task: a letter, then letters, digits, "-" and "_".

    Raises:
        ValueError: If the name is taken, or the class is not a frozen dataclass.
    """

    def register(kind: Kind) -> Kind:
        if not isinstance(kind, type) or not issubclass(kind, Task):
            raise ValueError(f"@register_task({name!r}): {kind!r} is not a subclass of Task")
        TASKS.add(name, kind)
        return kind

    return register


register_task(LANGUAGE)(LanguageModelling)


def build_task(
    model: ModelConfig,
    data: DataConfig,
    *,
    text: TextConfig | None = None,
    task: TaskConfig | None = None,
) -> Task:
    """Returns the task of a recipe.

    Args:
        model: Section `model`.
        data: Section `data`.
        text: Section `text`, of recipes about language.
        task: Section `task`, of recipes about language modelling or a task of another package.
    """
    if task is not None:
        kind = TASKS.find(task.name)
        if kind is None:
            raise ValueError(f"there is no task {task.name!r}; allowed: {TASKS.names()}")
        return kind(model, data, dict(task.args))
    if text is None:
        return ImageClassification(model, data, {})
    language = QuestionAnswering if text.task == SQUAD else SentenceClassification
    return language(model, data, {}, text)
