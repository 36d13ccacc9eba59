"""The same random numbers again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class Randomness:
    """The states of the random generators of the CPU and of some devices."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {d: torch.cuda.get_rng_state(d) for d in set(devices) if d.type == "cuda"}

    def replay(self) -> None:
        """Puts the generators back to where they were."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
