"""Tokenised texts and the datasets made of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchcram.experiments.data.text.formats import TEXT_FORMATS, TextFormat
from torchcram.experiments.seeds import seeded

CONTEXT = 4  # added to the kind of a token that may be in an answer


@dataclass(frozen=True)
class References:
    """What answers to questions are scored against.

    Attributes:
        contexts: the paragraphs.
        context_of: for every question, the place of its paragraph.
        answers: for every question, the texts of the right answers.
    """

    contexts: tuple[str, ...]
    context_of: tuple[int, ...]
    answers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Texts:
    """One split: token sequences one after another, none of them padded.

    A question about a long paragraph is several sequences, windows on the paragraph.

    Attributes:
        tokens: int32, (t,), of all sequences.
        kinds: uint8, (t,): 1 + the token type, and `CONTEXT` more where it may be in an answer.
        ends: int64, (n,): where each sequence ends in `tokens`.
        labels: int64: (n,) classes, or (n, 2) the first and the last token of the answer.
        examples: int64, (n,): which question or pair of sentences a sequence is of.
        offsets: int32, (t, 2): the characters of the context that a token stands for; (0, 2) for
            sentences.
        gold: for questions.
        parts: that training batches divide an epoch into; what they call one is a part then.
    """

    tokens: Tensor
    kinds: Tensor
    ends: Tensor
    labels: Tensor
    examples: Tensor
    offsets: Tensor
    references: References | None = None
    parts: int = 1

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def lengths(self) -> Tensor:
        """The tokens of each sequence, int64, (n,)."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    @property
    def count(self) -> int:
        """How many questions or pairs of sentences there are."""
        return len(self.examples.unique())

    def take(self, index: Tensor) -> Texts:
        """Returns a copy of the sequences at the places `index`, in that order."""
        lengths = self.lengths[index]
        ends = lengths.cumsum(0)
        places = torch.arange(int(lengths.sum())) + (self.ends[index] - ends).repeat_interleave(
            lengths
        )
        return replace(
            self,
            tokens=self.tokens[places],
            kinds=self.kinds[places],
            ends=ends,
            labels=self.labels[index],
            examples=self.examples[index],
            offsets=self.offsets[places] if len(self.offsets) else self.offsets,
        )


@dataclass(frozen=True, eq=False)
class TextSet:
    """A tokenised data set.

    Attributes:
        name: of the data set.
        kind: of its task, one of `TEXT_FORMATS`.
        train: what to train on.
        test: what to test on.
        contents: a short text that differs for other tokens, labels or right answers.
        notes: what was left out or cut when it was read, in words.
    """

    name: str
    kind: str
    train: Texts
    test: Texts
    contents: str
    notes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()  # as images have it

    @property
    def format(self) -> TextFormat:
        """Format of its files, with the metrics that it is scored by."""
        return TEXT_FORMATS[self.kind]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of what a model gives scores for."""
        return self.format.classes

    def in_parts(self, parts: int) -> TextSet:
        """Returns the set with epochs of training divided into so many."""
        return replace(self, train=replace(self.train, parts=parts))

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> TextSet:
        """Returns the set with a part of what is trained on to test on.

        All questions about a paragraph go the same way. The test split is left out.

        Args:
            fraction: of the paragraphs, or of the pairs of sentences; at least one of each part.
            seed: of the choice.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction {fraction!r} is not between 0 and 1")
        group = self.train.examples
        if self.train.references is not None:
            group = torch.tensor(self.train.references.context_of)[group]
        groups = group.unique()
        if len(groups) < 2:
            raise ValueError(f"data set {self.name!r} is too small to hold a part of it out")
        count = min(max(1, round(fraction * len(groups))), len(groups) - 1)
        order = torch.randperm(len(groups), generator=seeded(seed, "hold out"))
        held = torch.isin(group, groups[order[:count]])
        return replace(
            self,
            train=self.train.take((~held).nonzero().flatten()),
            test=self.train.take(held.nonzero().flatten()),
            contents=f"{self.contents} held out {fraction} {seed}",
        )
