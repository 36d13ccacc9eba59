"""Memory of large activations, kept for the next call.

The C library returns large blocks to the system when they are freed, and the system clears the
pages of a new block when they are first written. With large images that takes as long as some of
the layers. Blocks are therefore kept, and used again.
"""

from __future__ import annotations

import ctypes
import math
import os
import weakref
from collections import deque
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels

_FLOAT_BYTES = 4
_LEAST_BYTES = 2**20  # smaller tensors are left to torch
_HUGE_PAGES_FROM = 2**22  # bytes
_MOST_IDLE_BYTES = 2**29
_LARGEST_RATIO = 2  # of the size of a block to that of its tensor


class BlockPool:
    """Blocks of memory, each of which belongs to one tensor at a time.

    Args:
        most_idle: Number of bytes that blocks without a tensor may take. The ones that have been
            idle longest are freed.
    """

    def __init__(self, most_idle: int = _MOST_IDLE_BYTES) -> None:
        self.most_idle = most_idle
        self._idle: list[Tensor] = []  # from the one that has been idle longest
        self._returned: deque[Tensor] = deque()  # blocks that came back while the lock was held
        self._owners: dict[int, weakref.ref[object]] = {}
        self._lock = Lock()

    def renew_lock(self) -> None:
        """Replaces the lock; another thread may have held it when this process was forked."""
        self._lock = Lock()

    def empty(self, count: int) -> Tensor:
        """Returns an uninitialized vector of float32; its block comes back when it is freed.

        Like any tensor on memory that does not belong to torch, it cannot be enlarged in place.
        """
        block = self._take(count)
        if block is None:
            block = self._new(count)
        memory: Any = (ctypes.c_char * (count * _FLOAT_BYTES)).from_address(block.data_ptr())
        memory.block = block  # for as long as the tensor lives, even without this pool
        key = id(memory)

        def give_back(_: object) -> None:
            self._owners.pop(key, None)
            self._returned.append(block)
            if self._lock.acquire(blocking=False):  # this may run while this thread holds it
                try:
                    self._collect()
                finally:
                    self._lock.release()

        self._owners[key] = weakref.ref(memory, give_back)
        return torch.frombuffer(memory, dtype=torch.float32)

    def clear(self) -> None:
        """Frees all blocks without a tensor."""
        with self._lock:
            self._returned.clear()
            self._idle.clear()

    def idle_bytes(self) -> int:
        """Returns the number of bytes of all blocks without a tensor."""
        with self._lock:
            self._collect()
            return self._idle_bytes()

    def _idle_bytes(self) -> int:
        return _FLOAT_BYTES * sum(map(len, self._idle))

    def _collect(self) -> None:
        while self._returned:
            self._idle.append(self._returned.popleft())
        while self._idle_bytes() > self.most_idle:
            del self._idle[0]

    def _take(self, count: int) -> Tensor | None:
        """Returns the smallest idle block that is large enough, unless that is far too large."""
        with self._lock:
            self._collect()
            sizes = {
                index: len(block)
                for index, block in enumerate(self._idle)
                if count <= len(block) <= _LARGEST_RATIO * count
            }
            if not sizes:
                return None
            # Of two blocks of a size, the one used last is more likely to be in the caches.
            return self._idle.pop(min(sizes, key=lambda index: (sizes[index], -index)))

    def _new(self, count: int) -> Tensor:
        try:
            block = _allocate(count)
        except RuntimeError:  # not enough memory
            self.clear()
            block = _allocate(count)
        if count * _FLOAT_BYTES >= _HUGE_PAGES_FROM:
            kernels().torchcram_use_huge_pages(block.data_ptr(), count * _FLOAT_BYTES)
        return block


def _allocate(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.float32, device="cpu")


_pool = BlockPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _pool.renew_lock())


def empty_activations(size: tuple[int, ...]) -> Tensor:
    """Returns an uninitialized, contiguous tensor of float32."""
    count = math.prod(size)
    if count * _FLOAT_BYTES < _LEAST_BYTES:
        return torch.empty(size, dtype=torch.float32, device="cpu")
    return _pool.empty(count).view(size)


def empty_cache() -> None:
    """Frees the memory that prepared models on the CPU keep for the activations of their next call.

    It is at most 512 MB per process. Memory of tensors that still exist is not freed.
    """
    _pool.clear()
