"""What was computed from a tensor, for as long as the tensor lives and does not change."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

T = TypeVar("T")


class _Entry(NamedTuple, Generic[T]):
    """What is known of a tensor.

    Attributes:
        tensor: Weak reference to the tensor.
        state: Address, size and version of the tensor when the value was computed.
        value: Value that was computed from it.
    """

    tensor: weakref.ref[Tensor]
    state: tuple[int, int, int]
    value: T


class TensorCache(Generic[T]):
    """Values that were computed from tensors.

    Tensors are remembered by identity, because another tensor may reuse their memory. Torch counts
    the changes of a tensor, except for one made in inference mode, whose value is therefore
    computed every time. Writes that torch does not see go unnoticed.
    """

    def __init__(self) -> None:
        self._entries: dict[int, _Entry[T]] = {}

    def __len__(self) -> int:
        """Returns the number of tensors whose values are kept."""
        return len(self._entries)

    def __contains__(self, tensor: Tensor) -> bool:
        """Returns whether a value is kept for a tensor."""
        return id(tensor) in self._entries

    def get(self, tensor: Tensor, compute: Callable[[Tensor], T]) -> T:
        """Returns the value of a tensor, from an earlier call unless the tensor has changed.

        Args:
            tensor: Tensor in the memory of the CPU.
            compute: Function that computes the value.
        """
        if tensor.is_inference():
            return compute(tensor)
        key, state = id(tensor), (tensor.data_ptr(), tensor.numel(), tensor._version)
        entry = self._entries.get(key)
        if entry is not None and entry.state == state and entry.tensor() is tensor:
            return entry.value
        value = compute(tensor)
        reference = weakref.ref(tensor, lambda _: self._entries.pop(key, None))
        self._entries[key] = _Entry(reference, state, value)
        return value
