"""Converts texts to tokens: windows on paragraphs, sentences and pairs of sentences."""

from __future__ import annotations

from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from torchcram.experiments.data.text.datasets import CONTEXT, References, Texts

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torchcram.experiments.data.text.glue import Labelled
    from torchcram.experiments.data.text.squad import Questions


Array = np.ndarray[Any, Any]

LONGEST_QUESTION = 64  # tokens, as in BERT
CHUNK = 1000  # texts that are tokenised at a time


def tokenise_questions(
    data: Questions,
    tokenizer: Any,  # noqa: ANN401
    *,
    length: int,
    stride: int,
) -> tuple[Texts, int]:
    """Returns windows of at most `length` tokens, and how many answers are in none of them.

    A window is the question and a part of its paragraph; consecutive parts overlap by `stride`
    tokens. Where the answer is not in a window as a whole, its label is the first token.

    Args:
        data: Questions and their paragraphs.
        tokenizer: Fast tokenizer of Transformers.
        length: Greatest number of tokens in a window.
        stride: Number of tokens that consecutive windows share; at most a third of `length`.

    Raises:
        ValueError: If `length` leaves no room for windows that overlap by `stride`.
    """
    longest = min(LONGEST_QUESTION, (length - stride) // 2)
    room = length - tokenizer.num_special_tokens_to_add(pair=True) - longest
    if stride >= room:
        raise ValueError(f"windows of {room} tokens cannot overlap by {stride}")
    encoded = _encodings(
        tokenizer,
        _shortened([question.text.strip() for question in data.questions], tokenizer, longest),
        [data.contexts[question.context] for question in data.questions],
        truncation="only_second",
        max_length=length,
        stride=stride,
        return_overflowing_tokens=True,
    )
    sequences, uncovered = _Sequences(), 0
    for number, group in groupby(encoded, key=itemgetter(0)):
        windows = [_Window(encoding) for _, encoding in group]
        answer = data.questions[number].answers[0]
        begin = answer.start + len(answer.text) - len(answer.text.lstrip())
        parts = [windows[0].offsets, *(window.offsets[stride:] for window in windows[1:])]
        span = span_of(np.concatenate(parts), begin, begin + len(answer.text.strip()))
        start, covered = 0, False  # start: index in the paragraph of the window's first token
        for window in windows:
            label = window.label(span, start)
            covered |= label is not None
            sequences.add(window.encoding, label or (0, 0), number)
            sequences.mark_context(window)
            start += len(window.offsets) - stride
        uncovered += not covered
    references = References(
        data.contexts,
        tuple(question.context for question in data.questions),
        tuple(tuple(answer.text for answer in question.answers) for question in data.questions),
    )
    return sequences.texts(references), uncovered


def tokenise_sentences(
    data: Labelled,
    tokenizer: Any,  # noqa: ANN401
    *,
    length: int,
) -> tuple[Texts, int]:
    """Returns sentences or pairs of them, and how many were cut to `length` tokens.

    Of a pair, the longer sentence is cut first.

    Args:
        data: Sentences and their labels.
        tokenizer: Fast tokenizer of Transformers.
        length: Greatest number of tokens in a sentence or a pair, special tokens included.
    """
    sides = [data.first] if data.second is None else [data.first, data.second]
    sequences, cut = _Sequences(), 0
    for number, encoding in _encodings(
        tokenizer, *sides, truncation="longest_first", max_length=length
    ):
        cut += bool(encoding.overflowing)
        sequences.add(encoding, data.labels[number], number)
    return sequences.texts(None), cut


def span_of(offsets: Array, start: int, end: int) -> tuple[int, int] | None:
    """Returns the first and the last token of the characters from `start` to before `end`.

    A character may have several tokens, or none. If no character has one, returns None.

    Args:
        offsets: Characters of the tokens of a paragraph, (t, 2): the first, and after the last.
        start: Index of the first character.
        end: Index after the last character.
    """
    first = int(np.searchsorted(offsets[:, 1], start, side="right"))
    last = int(np.searchsorted(offsets[:, 0], end, side="left")) - 1
    return (first, last) if first <= last else None


def _encodings(
    tokenizer: Any,  # noqa: ANN401
    *sides: Sequence[str],
    **options: Any,  # noqa: ANN401
) -> Iterator[tuple[int, Any]]:
    """Yields the index of a text, or of a pair of texts, with each of its encodings."""
    unused = {"return_attention_mask": False, "return_token_type_ids": False}
    for begin in range(0, len(sides[0]), CHUNK):
        texts = [list(side[begin : begin + CHUNK]) for side in sides]
        batch = tokenizer(*texts, **options, **unused)
        indices = batch.get("overflow_to_sample_mapping", range(len(batch.encodings)))
        for index, encoding in zip(indices, batch.encodings, strict=True):
            yield begin + index, encoding


def _shortened(texts: Sequence[str], tokenizer: Any, longest: int) -> list[str]:  # noqa: ANN401
    """Returns texts cut to at most `longest` tokens, between characters."""
    shortened = list(texts)
    for number, encoding in _encodings(tokenizer, texts, add_special_tokens=False):
        if len(encoding.ids) > longest:
            end = encoding.offsets[longest][0]
            while len(tokenizer.encode(texts[number][:end], add_special_tokens=False)) > longest:
                end -= 1
            shortened[number] = texts[number][:end]
    return shortened


class _Window:
    """A question and a part of its paragraph.

    Attributes:
        encoding: Encoding by the tokenizer.
        context: Indices of the paragraph's tokens.
        offsets: Characters of these tokens in the paragraph, (t, 2).
    """

    def __init__(self, encoding: Any) -> None:  # noqa: ANN401
        self.encoding = encoding
        whose = encoding.sequence_ids
        count = whose.count(1)
        first = whose.index(1) if count else 0
        self.context = slice(first, first + count)
        self.offsets = np.array(encoding.offsets[self.context], np.int32).reshape(-1, 2)

    def label(self, span: tuple[int, int] | None, start: int) -> tuple[int, int] | None:
        """Returns the first and the last token of a span; None if it is not wholly inside.

        Args:
            span: First and last token of the answer, as indices in the paragraph.
            start: Index in the paragraph of the first of its tokens in the window.
        """
        if span is None or span[0] < start or span[1] >= start + len(self.offsets):
            return None
        shift = self.context.start - start
        return span[0] + shift, span[1] + shift


class _Sequences:
    """Collects token sequences for a `Texts`."""

    def __init__(self) -> None:
        self._tokens: list[Array] = []
        self._kinds: list[Array] = []
        self._offsets: list[Array] = []
        self._labels: list[int | tuple[int, int]] = []
        self._examples: list[int] = []

    def add(self, encoding: Any, label: int | tuple[int, int], example: int) -> None:  # noqa: ANN401
        self._tokens.append(np.array(encoding.ids, np.int32))
        self._kinds.append(np.array(encoding.type_ids, np.uint8) + np.uint8(1))
        self._labels.append(label)
        self._examples.append(example)

    def mark_context(self, window: _Window) -> None:
        """Marks the tokens of the paragraph in the sequence that was added last."""
        self._kinds[-1][window.context] += np.uint8(CONTEXT)
        offsets = np.zeros((len(self._tokens[-1]), 2), dtype=np.int32)
        offsets[window.context] = window.offsets
        self._offsets.append(offsets)

    def texts(self, references: References | None) -> Texts:
        lengths = torch.tensor([len(tokens) for tokens in self._tokens])
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
