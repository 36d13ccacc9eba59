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
    """Right answers, which the answers of a model are scored against.

    Attributes:
        contexts: Paragraphs that the questions are about.
        context_of: Index of the paragraph of each question.
        answers: Texts of the right answers to each question.
    """

    contexts: tuple[str, ...]
    context_of: tuple[int, ...]
    answers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, eq=False)
class Texts:
    """One split: token sequences one after another, without padding.

    A question about a long paragraph is several sequences, one for each window on the paragraph.

    Attributes:
        tokens: Tokens of all sequences, int32, (t,).
        kinds: Kinds of the tokens, uint8, (t,): 1 + the token type, plus `CONTEXT` if the token may
            be in an answer.
        ends: Index in `tokens` after the end of each sequence, int64, (n,).
        labels: Classes, int64, (n,); or the first and the last token of the answer, (n, 2).
        examples: Index of the question or pair of sentences of each sequence, int64, (n,).
        offsets: Characters of the context that a token stands for, int32, (t, 2): the first, and
            after the last; (0, 2) for sentences.
        references: Right answers to questions; None for sentences.
        parts: Number of parts that training batches divide an epoch into, each of which they count
            as an epoch.
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
        """Number of tokens of each sequence, int64, (n,)."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    @property
    def count(self) -> int:
        """Number of questions or pairs of sentences."""
        return len(self.examples.unique())

    def take(self, index: Tensor) -> Texts:
        """Returns a copy of the sequences at the indices `index`, in that order."""
        lengths = self.lengths[index]
        ends = lengths.cumsum(0)
        shift = (self.ends[index] - ends).repeat_interleave(lengths)
        chosen = torch.arange(int(lengths.sum())) + shift
        return replace(
            self,
            tokens=self.tokens[chosen],
            kinds=self.kinds[chosen],
            ends=ends,
            labels=self.labels[index],
            examples=self.examples[index],
            offsets=self.offsets[chosen] if len(self.offsets) else self.offsets,
        )


@dataclass(frozen=True, eq=False)
class TextSet:
    """A tokenised dataset.

    Attributes:
        name: Name of the dataset.
        kind: Name of its format, a key of `TEXT_FORMATS`.
        train: Training split.
        test: Test split.
        contents: Digest of tokens, labels and right answers.
        notes: Notes on the sizes of the splits and on what was left out or cut.
        mean: Empty tuple; images have a mean per channel.
    """

    name: str
    kind: str
    train: Texts
    test: Texts
    contents: str
    notes: tuple[str, ...] = ()
    mean: tuple[float, ...] = ()

    @property
    def format(self) -> TextFormat:
        """Format of its files, with the metrics that it is scored by."""
        return TEXT_FORMATS[self.kind]

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the model's outputs."""
        return self.format.classes

    def in_parts(self, parts: int) -> TextSet:
        """Returns the dataset with training epochs divided into so many parts."""
        return replace(self, train=replace(self.train, parts=parts))

    def hold_out(self, fraction: float = 0.1, seed: int = 0) -> TextSet:
        """Returns the dataset with a part of its training split in place of the test split.

        All questions about a paragraph stay together.

        Args:
            fraction: Fraction of the paragraphs, or of the pairs of sentences, to test on; at
                least one is taken, and at least one is left.
            seed: Seed of the choice.
        """
        if not 0 < fraction < 1:
            raise ValueError(f"fraction must be between 0 and 1, got {fraction!r}")
        group = self.train.examples
        if self.train.references is not None:
            group = torch.tensor(self.train.references.context_of)[group]
        groups = group.unique()
        if len(groups) < 2:
            raise ValueError(f"dataset {self.name!r} is too small to hold a part of it out")
        count = min(max(1, round(fraction * len(groups))), len(groups) - 1)
        order = torch.randperm(len(groups), generator=seeded(seed, "hold out"))
        held = torch.isin(group, groups[order[:count]])
        return replace(
            self,
            train=self.train.take((~held).nonzero().flatten()),
            test=self.train.take(held.nonzero().flatten()),
            contents=f"{self.contents} held out {fraction} {seed}",
        )
