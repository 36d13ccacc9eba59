"""Reads questions about paragraphs from the JSON of SQuAD v1.1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

SHAPE = (
    'data, a list of articles, each with "paragraphs" of "context" and "qas", each of "question" '
    'and "answers" of "text" and "answer_start"'
)


@dataclass(frozen=True)
class Answer:
    """A right answer.

    Attributes:
        text: Text of the answer.
        start: Index of its first character in the context.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    Attributes:
        text: Text of the question.
        context: Index of the paragraph in `Questions.contexts`.
        answers: Right answers, at least one.
    """

    text: str
    context: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Questions:
    """Questions of a file, with their paragraphs.

    Attributes:
        contexts: Paragraphs.
        questions: Questions about the paragraphs.
        misplaced: Number of questions left out because the answer is not at its offset.
        unanswered: Number of questions left out because they have no answer or an empty one.
    """

    contexts: tuple[str, ...]
    questions: tuple[Question, ...]
    misplaced: int = 0
    unanswered: int = 0


def read_squad(content: bytes, where: str, *, placed: bool) -> Questions:
    """Reads a file.

    Args:
        content: Content of the file.
        where: Name of the file for error messages.
        placed: Whether to leave out, and count, questions whose first answer is not at its offset,
            which cannot be trained on.

    Raises:
        ValueError: If the file is not JSON, not SQuAD, or no question can be used.
    """
    try:
        paragraphs = list(_paragraphs(json.loads(content.decode("utf-8-sig"))))
    except (ValueError, RecursionError) as error:  # also for numbers with too many digits
        raise ValueError(f"{where} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError, _NotSquadError) as error:
        raise ValueError(f"{where} is not SQuAD v1.1 ({error}); it must have {SHAPE}") from None
    contexts = tuple(context for context, _ in paragraphs)
    questions, misplaced, unanswered = [], 0, 0
    for number, (context, entries) in enumerate(paragraphs):
        for text, answers in entries:
            if not answers or not answers[0].text.strip():
                unanswered += 1
            elif placed and not _is_there(answers[0], context):
                misplaced += 1
            else:
                questions.append(Question(text, number, answers))
    if not questions:
        left = f": {misplaced} have an answer that is not at its offset, {unanswered} have none"
        raise ValueError(f"{where} has no questions to use{left if misplaced + unanswered else ''}")
    return Questions(contexts, tuple(questions), misplaced, unanswered)


class _NotSquadError(Exception):
    pass


Entries = list[tuple[str, tuple[Answer, ...]]]


def _paragraphs(data: Any) -> Iterator[tuple[str, Entries]]:  # noqa: ANN401
    for article in _list(data["data"], "data"):
        for paragraph in _list(article["paragraphs"], "paragraphs"):
            entries = [
                (
                    _text(entry["question"], "question"),
                    tuple(
                        Answer(_text(answer["text"], "text"), _offset(answer["answer_start"]))
                        for answer in _list(entry["answers"], "answers")
                    ),
                )
                for entry in _list(paragraph["qas"], "qas")
            ]
            yield _text(paragraph["context"], "context"), entries


def _list(value: Any, name: str) -> list[Any]:  # noqa: ANN401
    if not isinstance(value, list):
        raise _NotSquadError(f"{name!r} is not a list")
    return value


def _text(value: Any, name: str) -> str:  # noqa: ANN401
    if not isinstance(value, str):
        raise _NotSquadError(f"{name!r} is not a text")
    try:
        value.encode()  # JSON can hold lone surrogates, which tokenizers cannot take
    except UnicodeEncodeError as error:
        surrogate = f"{value[error.start]!r} at character {error.start}"
        raise _NotSquadError(f"{name!r} has a lone surrogate, {surrogate}") from None
    return value


def _offset(value: Any) -> int:  # noqa: ANN401
    if not isinstance(value, int) or isinstance(value, bool):
        raise _NotSquadError("'answer_start' is not a whole number")
    return value


def _is_there(answer: Answer, context: str) -> bool:
    return answer.start >= 0 and context.startswith(answer.text, answer.start)
