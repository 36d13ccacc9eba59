"""From texts to tokens: windows on paragraphs, pairs of sentences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchcram.experiments.data.text.datasets import CONTEXT, References, Texts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torchcram.experiments.data.text.glue import Labelled
    from torchcram.experiments.data.text.squad import Questions


Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Coded:
    """A text as tokens, and the characters, (t, 2), that they stand for."""

    tokens: Array
    offsets: Array


@dataclass(frozen=True)
class Frame:
    """What a tokenizer puts around and between two texts, or around one.

    Attributes:
        tokens: before the first text, after it (between both), after the second.
        types: of these tokens, likewise.
        own: the types of the tokens of the texts.
    """

    tokens: tuple[Array, ...]
    types: tuple[Array, ...]
    own: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, texts: int) -> Frame:  # noqa: ANN401
        """Asks a tokenizer for what goes with one text or two."""
        encoding = tokenizer.backend_tokenizer.encode(*["a"] * texts)
        whose, ids, types = encoding.sequence_ids, encoding.ids, encoding.type_ids
        edges = [0]
        for text in range(texts):
            edges += [whose.index(text), len(whose) - whose[::-1].index(text)]
        between = [slice(*pair) for pair in zip(edges[::2], [*edges[1::2], len(ids)], strict=True)]
        return cls(
            tuple(np.array(ids[one], dtype=np.int32) for one in between),
            tuple(np.array(types[one], dtype=np.uint8) for one in between),
            tuple(int(types[whose.index(text)]) for text in range(texts)),
        )

    @property
    def count(self) -> int:
        """How many tokens it adds."""
        return sum(map(len, self.tokens))

    def around(self, *texts: Array) -> tuple[Array, Array]:
        """Returns the tokens with the texts in between, and the types of all."""
        tokens, types = [self.tokens[0]], [self.types[0]]
        for place, text in enumerate(texts):
            tokens += [text, self.tokens[place + 1]]
            types += [np.full(len(text), self.own[place], np.uint8), self.types[place + 1]]
        return np.concatenate(tokens), np.concatenate(types)


def coded(texts: Sequence[str], tokenizer: Any) -> list[Coded]:  # noqa: ANN401
    """Returns the tokens of texts, with nothing around them."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return [
        Coded(np.array(one.ids, dtype=np.int32), np.array(one.offsets, np.int32).reshape(-1, 2))
        for one in backend.encode_batch(list(texts), add_special_tokens=False)
    ]


LONGEST_QUESTION = 64  # tokens, as BERT has it


def tokenise_questions(
    given: Questions,
    tokenizer: Any,  # noqa: ANN401
    *,
    length: int,
    stride: int,
) -> tuple[Texts, int]:
    """Returns windows of at most `length` tokens, and how many answers are in none of them.

    A window is the question and a part of its paragraph; consecutive parts overlap by `stride`
    tokens. Where the answer is not in a window as a whole, its label is the first token.

    Args:
        given: questions and paragraphs.
        tokenizer: a fast one of Transformers.
        length: of a window, at most.
        stride: of the overlap; at most a third of `length`.
    """
    frame = Frame.of(tokenizer, 2)
    longest = min(LONGEST_QUESTION, (length - stride) // 2)
    contexts = coded(given.contexts, tokenizer)
    asked = coded([one.text.strip() for one in given.questions], tokenizer)
    parts, uncovered = _Parts(), 0
    for number, (question, code) in enumerate(zip(given.questions, asked, strict=True)):
        context, answer = contexts[question.context], question.answers[0]
        words = code.tokens[:longest]
        begin = answer.start + len(answer.text) - len(answer.text.lstrip())
        span = span_of(context.offsets, begin, begin + len(answer.text.strip()))
        room, covered = length - frame.count - len(words), False
        for start in starts(len(context.tokens), room, stride):
            part = slice(start, start + room)
            first = len(frame.tokens[0]) + len(words) + len(frame.tokens[1]) - start
            inside = span is not None and start <= span[0] and span[1] < start + room
            covered |= inside
            label = (first + span[0], first + span[1]) if span is not None and inside else (0, 0)
            tokens, types = frame.around(words, context.tokens[part])
            parts.add(tokens, types, label, number)
            parts.mark(first + start, context.offsets[part])
        uncovered += not covered
    references = References(
        given.contexts,
        tuple(one.context for one in given.questions),
        tuple(tuple(answer.text for answer in one.answers) for one in given.questions),
    )
    return parts.texts(references), uncovered


def starts(count: int, room: int, stride: int) -> range:
    """Returns where windows of `room` tokens begin, so that they cover `count` and overlap."""
    if stride >= room:
        raise ValueError(f"windows of {room} tokens cannot overlap by {stride}")
    return range(0, max(1, count - stride), room - stride)


def span_of(offsets: Array, start: int, end: int) -> tuple[int, int] | None:
    """Returns the first and the last token that hold a character from `start` to before `end`.

    None if there is none. A character may be several tokens.

    Args:
        offsets: (t, 2), the characters of the tokens of a paragraph.
        start: of the first character.
        end: after the last.
    """
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def tokenise_sentences(
    given: Labelled,
    tokenizer: Any,  # noqa: ANN401
    *,
    length: int,
) -> tuple[Texts, int]:
    """Returns sentences or pairs of them, and how many were cut to `length` tokens.

    Of a pair, the longer one is cut first.
    """
    sides = [given.first] if given.second is None else [given.first, given.second]
    frame = Frame.of(tokenizer, len(sides))
    parts, cut = _Parts(), 0
    codes = [[one.tokens for one in coded(side, tokenizer)] for side in sides]
    for place, texts in enumerate(zip(*codes, strict=True)):
        room = length - frame.count
        cut += sum(map(len, texts)) > room
        tokens, types = frame.around(*_shortened(texts, room))
        parts.add(tokens, types, given.labels[place], place)
    return parts.texts(None), cut


def _shortened(texts: tuple[Array, ...], room: int) -> list[Array]:
    """Returns one text or two that together have room, the longer one cut first."""
    *first, last = texts
    kept = [one[: max(room - len(last), (room + 1) // 2)] for one in first]
    return [*kept, last[: room - sum(map(len, kept))]]


class _Parts:
    """Sequences that come one by one."""

    def __init__(self) -> None:
        self._tokens: list[Array] = []
        self._kinds: list[Array] = []
        self._offsets: list[Array] = []
        self._labels: list[int | tuple[int, int]] = []
        self._examples: list[int] = []

    def add(self, tokens: Array, types: Array, label: int | tuple[int, int], example: int) -> None:
        self._tokens.append(tokens)
        self._kinds.append(types + np.uint8(1))
        self._labels.append(label)
        self._examples.append(example)

    def mark(self, first: int, offsets: Array) -> None:
        """Says of the last sequence where its paragraph is, and what its characters are."""
        self._kinds[-1][first : first + len(offsets)] += np.uint8(CONTEXT)
        whole = np.zeros((len(self._tokens[-1]), 2), dtype=np.int32)
        whole[first : first + len(offsets)] = offsets
        self._offsets.append(whole)

    def texts(self, references: References | None) -> Texts:
        lengths = torch.tensor([len(one) for one in self._tokens])
        empty = np.zeros((0, 2), dtype=np.int32)
        return Texts(
            tokens=torch.from_numpy(np.concatenate(self._tokens)),
            kinds=torch.from_numpy(np.concatenate(self._kinds)),
            ends=lengths.cumsum(0),
            labels=torch.tensor(self._labels),
            examples=torch.tensor(self._examples),
            offsets=torch.from_numpy(np.concatenate(self._offsets or [empty])),
            references=references,
        )
