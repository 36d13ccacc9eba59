"""Questions about paragraphs, out of the JSON of SQuAD v1.1."""

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
        text: of it.
        start: of its first character in the context.
    """

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question.

    Attributes:
        text: of it.
        context: place of the paragraph among the contexts.
        answers: right ones, at least one.
    """

    text: str
    context: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Questions:
    """What a file holds.

    Attributes:
        contexts: the paragraphs.
        questions: about them.
        misplaced: how many were left out, since the text of an answer is not where it says.
        unanswered: how many were left out, since they have no answer or an empty one.
    """

    contexts: tuple[str, ...]
    questions: tuple[Question, ...]
    misplaced: int = 0
    unanswered: int = 0


def read_squad(content: bytes, where: str, *, placed: bool) -> Questions:
    """Reads a file.

    Args:
        content: of the file.
        where: it is from, for messages.
        placed: whether the first answer has to be where it says, as training on it needs; questions
            of which it is not are left out and counted.

    Raises:
        ValueError: if it is not JSON, not SQuAD, or no question is left.
    """
    try:
        paragraphs = list(_paragraphs(json.loads(content.decode("utf-8-sig"))))
    except (ValueError, RecursionError) as error:  # a number may have too many digits, too
        raise ValueError(f"{where} is not JSON: {error}") from None
    except (KeyError, TypeError, AttributeError, _NotSquadError) as error:
        raise ValueError(f"{where} is not SQuAD v1.1 ({error}): needed is {SHAPE}") from None
    contexts = tuple(context for context, _ in paragraphs)
    questions, misplaced, unanswered = [], 0, 0
    for place, (context, asked) in enumerate(paragraphs):
        for text, answers in asked:
            if not answers or not answers[0].text.strip():
                unanswered += 1
            elif placed and not _is_there(answers[0], context):
                misplaced += 1
            else:
                questions.append(Question(text, place, answers))
    if not questions:
        left = f": {misplaced} have an answer that is not at its offset, {unanswered} have none"
        raise ValueError(f"{where} has no questions to use{left if misplaced + unanswered else ''}")
    return Questions(contexts, tuple(questions), misplaced, unanswered)


class _NotSquadError(Exception):
    pass


Asked = list[tuple[str, tuple[Answer, ...]]]


def _paragraphs(data: Any) -> Iterator[tuple[str, Asked]]:  # noqa: ANN401
    for article in _list(data["data"], "data"):
        for paragraph in _list(article["paragraphs"], "paragraphs"):
            asked = [
                (
                    _text(one["question"], "question"),
                    tuple(
                        Answer(_text(answer["text"], "text"), _place(answer["answer_start"]))
                        for answer in _list(one["answers"], "answers")
                    ),
                )
                for one in _list(paragraph["qas"], "qas")
            ]
            yield _text(paragraph["context"], "context"), asked


def _list(given: Any, name: str) -> list[Any]:  # noqa: ANN401
    if not isinstance(given, list):
        raise _NotSquadError(f"{name!r} is no list")
    return given


def _text(given: Any, name: str) -> str:  # noqa: ANN401
    if not isinstance(given, str):
        raise _NotSquadError(f"{name!r} is no text")
    try:
        given.encode()  # JSON can hold what no text has, and tokenizers fail at it
    except UnicodeEncodeError as error:
        found = f"{given[error.start]!r} at character {error.start}"
        raise _NotSquadError(f"{name!r} has a lone surrogate, {found}") from None
    return given


def _place(given: Any) -> int:  # noqa: ANN401
    if not isinstance(given, int) or isinstance(given, bool):
        raise _NotSquadError("'answer_start' is no whole number")
    return given


def _is_there(answer: Answer, context: str) -> bool:
    return answer.start >= 0 and context.startswith(answer.text, answer.start)
