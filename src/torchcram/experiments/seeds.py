"""Random numbers that depend on nothing but what they are asked for with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def mixed(*key: int | str) -> int:
    """Returns 63 bits that look random and are the same for the same key, everywhere."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(*key: int | str) -> torch.Generator:
    """Returns a CPU generator for `key`, independent of the global one."""
    return torch.Generator().manual_seed(mixed(*key))


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seeds the global generator of the CPU for a `with` block; puts it back afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPUs too
        yield
