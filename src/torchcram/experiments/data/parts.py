"""Which part of the batches a process takes, where several work together."""

from __future__ import annotations

from typing import NamedTuple


class Part(NamedTuple):
    """One of several parts.

    Attributes:
        number: which, from 0.
        of: how many there are.
    """

    number: int = 0
    of: int = 1

    def within(self, size: int) -> slice:
        """Returns the places of this part among `size`; parts differ in length by one at most.

        Raises:
            ValueError: if a part would be empty.
        """
        if size < self.of:
            raise ValueError(f"a batch of {size} images cannot be divided into {self.of} parts")
        return slice(size * self.number // self.of, size * (self.number + 1) // self.of)

    def among(self, count: int) -> range:
        """Returns which of `count` things, each as a whole, are of this part; it may be none."""
        return range(self.number, count, self.of)

    def share(self, size: int) -> float:
        """Returns how much of `size` this part is, from 0 to 1."""
        return len(range(size)[self.within(size)]) / size


WHOLE = Part()
