"""Single texts as tokens, and what a tokenizer puts around them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

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
