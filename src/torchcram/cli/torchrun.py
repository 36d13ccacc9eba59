"""Rank and world size, from the environment that torchrun gives to its processes."""

from __future__ import annotations

import os


def processes() -> int:
    """Returns the number of processes that torchrun started for this command; 1 without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Returns the rank of this process, from 0."""
    return int(os.environ["RANK"]) if processes() > 1 else 0


def local_rank() -> int:
    """Returns the rank of this process on its machine, from 0."""
    return int(os.environ["LOCAL_RANK"]) if processes() > 1 else 0
