"""Seeds and random generators that depend on nothing but a key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def mixed(*key: int | str) -> int:
    """Returns a seed of 63 bits that depends on the key alone, on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(*key: int | str) -> torch.Generator:
    """Returns a CPU generator for `key`, independent of the global one."""
    return torch.Generator().manual_seed(mixed(*key))


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seeds the global CPU generator for a `with` block and restores it afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reach the GPUs too
        yield
