"""What torchrun says in the environment of the processes it starts."""

from __future__ import annotations

import os


def processes() -> int:
    """Returns how many processes torchrun has started for this command; 1 without it."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return 1
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Returns which of them this is, from 0."""
    return int(os.environ["RANK"]) if processes() > 1 else 0


def local_rank() -> int:
    """Returns which of those on this machine this is, from 0."""
    return int(os.environ["LOCAL_RANK"]) if processes() > 1 else 0
