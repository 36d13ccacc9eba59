"""One compression after another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchcram.operators.base import Operator

if TYPE_CHECKING:
    import torch

    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class Chain(Operator):
    """C(w) = then(first(w)), pruning and then rounding, say; its mask keeps what both keep."""

    first: Operator
    then: Operator

    def __post_init__(self) -> None:
        for part in (self.first, self.then):
            if not isinstance(part, Operator):
                raise ValueError(f"Chain: {part!r} is not an Operator")
        if isinstance(self.then, Chain):  # a + (b + c) is written (a + b) + c
            object.__setattr__(self, "first", Chain(self.first, self.then.first))
            object.__setattr__(self, "then", self.then.then)

    def compress_(self, weights: Weights) -> Masks | None:
        """Compresses by `first`, then by `then`."""
        one = self.first.compress_(weights)
        two = self.then.compress_(weights)
        if one is None or two is None:
            return two if one is None else one
        return {name: one[name] & two[name] for name in one}

    def recompress_(self, weights: Weights, masks: Masks) -> None:
        """Compresses by both, with the mask of the whole chain in place of theirs."""
        self.first.recompress_(weights, masks)
        self.then.recompress_(weights, masks)

    @property
    def is_range(self) -> bool:
        """Whether either part stands for a range."""
        return self.first.is_range or self.then.is_range

    def draw(self, generator: torch.Generator) -> Chain:
        """Draws both parts."""
        return Chain(self.first.draw(generator), self.then.draw(generator))

    def __str__(self) -> str:
        return f"{self.first}+{self.then}"
