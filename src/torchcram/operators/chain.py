"""Chain, an operator that applies two operators one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING

from torchcram.operators.base import Operator

if TYPE_CHECKING:
    import torch

    from torchcram.weights import Masks, Weights


@dataclass(frozen=True, eq=False, repr=False)
class Chain(Operator):
    """C(w) = then(first(w)), for example pruning and then rounding; its mask keeps what both keep.

    No method recurses into `first`, so that a chain may have any number of parts.
    """

    first: Operator
    then: Operator

    def __post_init__(self) -> None:
        for part in (self.first, self.then):
            if not isinstance(part, Operator):
                raise ValueError(f"Chain: {part!r} is not an Operator")
        if isinstance(self.then, Chain):  # a + (b + c) is written (a + b) + c
            *earlier, last = self.then.parts
            object.__setattr__(self, "first", reduce(Chain, earlier, self.first))
            object.__setattr__(self, "then", last)

    @property
    def parts(self) -> tuple[Operator, ...]:
        """Operators of the chain in the order in which they compress; none is a chain."""
        parts = []
        operator: Operator = self
        while isinstance(operator, Chain):
            parts.append(operator.then)
            operator = operator.first
        return (operator, *reversed(parts))

    def compress_(self, weights: Weights) -> Masks | None:
        """Compresses with one part after the other."""
        kept: Masks | None = None
        for part in self.parts:
            masks = part.compress_(weights)
            if kept is None or masks is None:
                kept = masks if kept is None else kept
            else:
                kept = {name: kept[name] & masks[name] for name in kept}
        return kept

    def recompress_(self, weights: Weights, masks: Masks) -> None:
        """Compresses with all parts, using the masks of the whole chain instead of theirs."""
        for part in self.parts:
            part.recompress_(weights, masks)

    @property
    def is_range(self) -> bool:
        """Whether a part stands for a range of operators."""
        return any(part.is_range for part in self.parts)

    def draw(self, generator: torch.Generator) -> Operator:
        """Returns the chain of operators drawn for each part."""
        return join([part.draw(generator) for part in self.parts])

    def __eq__(self, other: object) -> bool:
        return self.parts == other.parts if isinstance(other, Chain) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.parts)

    def __reduce__(self) -> tuple[object, ...]:
        return join, (self.parts,)

    def __repr__(self) -> str:
        first, *others = map(repr, self.parts)
        opened = "Chain(first=" * len(others)
        return opened + first + "".join(f", then={other})" for other in others)

    def __str__(self) -> str:
        return "+".join(map(str, self.parts))


def join(parts: list[Operator] | tuple[Operator, ...]) -> Operator:
    """Returns the chain of `parts`; a single part is returned itself."""
    return reduce(Chain, parts)
