"""The inputs that a model is exported with: a tensor, arguments, or keyword arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from torch import nn

CONSTANTS = (type(None), bool, int, float, str)
"""Types of arguments that are no inputs of the file: their values are fixed in it."""


@dataclass(frozen=True)
class Example:
    """What a model is called with.

    Attributes:
        values: Tensors and constants, by the name of the argument or, in order, by its position.
        named: Whether they are keyword arguments.
    """

    values: Mapping[Any, object]
    named: bool

    @classmethod
    def of(cls, given: object) -> Example:
        """Reads an example as `torchcram.runtime.prepare` takes it.

        Raises:
            ValueError: saying what was given and what is allowed.
        """
        if isinstance(given, Mapping):
            values = dict(given)
        elif isinstance(given, (Tensor, tuple)):
            values = dict(enumerate(given if isinstance(given, tuple) else (given,)))
        else:
            raise ValueError(
                "example must be a tensor, a tuple of arguments or a mapping of keyword arguments, "
                f"got {type(given).__name__}"
            )
        named = isinstance(given, Mapping)
        for key, value in values.items():
            if named and not isinstance(key, str):
                raise ValueError(f"example has the key {key!r}, which is no name of an argument")
            if not isinstance(value, (Tensor, *CONSTANTS)):
                raise ValueError(
                    f"example[{key!r}] is {type(value).__name__}; allowed are tensors, and None, "
                    "bool, int, float and str, which are fixed in the file"
                )
        if not any(isinstance(value, Tensor) for value in values.values()):
            raise ValueError("example is empty: one tensor for each input is needed")
        return cls(values, named)

    @property
    def tensors(self) -> dict[Any, Tensor]:
        """The inputs of the file, in order."""
        return {key: value for key, value in self.values.items() if isinstance(value, Tensor)}

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the inputs."""
        return [tuple(value.shape) for value in self.tensors.values()]

    @property
    def args(self) -> tuple[object, ...]:
        """The arguments by position."""
        return () if self.named else tuple(self.values.values())

    @property
    def kwargs(self) -> dict[str, object]:
        """The arguments by name."""
        return dict(self.values) if self.named else {}

    def each(self, change: Callable[[Tensor], Tensor]) -> Example:
        """Returns the example with every tensor changed."""
        return self.with_tensors([change(value) for value in self.tensors.values()])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Example:
        """Returns the example with other tensors in place of its own, in order."""
        return replace(
            self, values={**self.values, **dict(zip(self.tensors, tensors, strict=True))}
        )

    def for_each_tensor(self, values: Sequence[Any]) -> dict[str, Any] | tuple[Any, ...]:
        """Returns the arguments with other values for the tensors and None for the constants."""
        known = dict(zip(self.tensors, values, strict=True))
        every = {key: known.get(key) for key in self.values}
        return every if self.named else tuple(every.values())

    def run(self, model: nn.Module) -> object:
        """Calls a model with it."""
        return model(*self.args, **self.kwargs)
