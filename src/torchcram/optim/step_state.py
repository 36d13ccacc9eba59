"""State of one step: its progress, the backup of w, the undo stack and random states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from torchcram.optim.sampler import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from torchcram.optim.gradients import Gradients
    from torchcram.optim.rules import Pass
    from torchcram.sharding import ShardContext


@dataclass
class StepState:
    """Progress of one step.

    It is one object because wrappers such as Lightning's copy attributes of the optimizer.

    Attributes:
        plan: Plan of the step: the operator drawn for it, or a plain step.
        passes: Passes that are left in the step; those of a plain step do nothing.
        g: Gradient at w while a compressed pass is under way, otherwise None.
        ready: Whether `.grad` holds g~, so that a step may be taken.
    """

    plan: StepPlan = field(default_factory=StepPlan)
    passes: list[Pass] = field(default_factory=list)
    g: Gradients | None = None
    ready: bool = False


class UndoStack:
    """Stack of calls that undo changes; each call is kept until it has returned.

    Unwinding may be interrupted anywhere (Ctrl-C, out of memory) and is then simply repeated, which
    `contextlib.ExitStack` does not allow. A call may therefore run twice and must be idempotent.

    Attributes:
        unwinding: Whether `unwind` has begun since the last push.
    """

    def __init__(self) -> None:
        self.unwinding = False
        self._calls: list[Callable[[], object]] = []

    def push(self, call: Callable[[], object]) -> None:
        """Adds a call; push it before making the change that it undoes."""
        self.unwinding = False
        self._calls.append(call)

    def unwind(self) -> None:
        """Runs all calls, the latest first."""
        self.unwinding = True
        while self._calls:
            self._calls[-1]()
            self._calls.pop()


class WeightBackup(Protocol):
    """Keeps w while the weights are at w~."""

    def start_step(self) -> None:
        """Is called before the pass at w."""

    def save(self, parameters: Iterable[Tensor]) -> None:
        """Is called before `parameters` are moved to w~, in place."""

    def restore(self) -> None:
        """Makes the parameters w again, bit for bit; calling it again changes nothing."""


class Backup:
    """Copies of parameters, in memory that is allocated once and reused at every step."""

    def __init__(self, shard_context: ShardContext) -> None:
        self._shard_context = shard_context
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}  # by id: (parameter, copy)
        self._saved: tuple[list[Tensor], list[Tensor]] = ([], [])

    def start_step(self) -> None:
        """Does nothing."""

    @torch.no_grad()
    def save(self, parameters: Iterable[Tensor]) -> None:
        """Copies `parameters`."""
        saved = list(parameters)
        copies = self.memory_for(saved)
        if saved:
            torch._foreach_copy_(copies, self._shard_context.local(saved))
        self._saved = (saved, copies)

    @torch.no_grad()
    def restore(self) -> None:
        """Puts the values saved last back, bit for bit; calling it again changes nothing."""
        saved, copies = self._saved
        if saved:
            torch._foreach_copy_(self._shard_context.local(saved), copies)
        self._saved = ([], [])

    def memory_for(self, parameters: list[Tensor]) -> list[Tensor]:
        """Returns the memory for copies of `parameters`, of the rows on this rank."""
        local = self._shard_context.local(parameters)
        return [self._memory(*pair) for pair in zip(parameters, local, strict=True)]

    def _memory(self, parameter: Tensor, local: Tensor) -> Tensor:
        """Returns memory for a copy of `local`, the shard of a parameter on this rank."""
        held = self._copies.get(id(parameter))
        if held is None or held[0] is not parameter or _kind(held[1]) != _kind(local):
            held = (parameter, torch.empty_like(local))
            self._copies[id(parameter)] = held
        return held[1]


def _kind(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.get_device(), tensor.shape, tensor.stride()


class RngState:
    """States of the random generators of the CPU and of CUDA devices, to restore later."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._cpu = torch.get_rng_state()
        self._cuda = {d: torch.cuda.get_rng_state(d) for d in set(devices) if d.type == "cuda"}

    def restore(self) -> None:
        """Puts the generators back into the saved states."""
        torch.set_rng_state(self._cpu)
        for device, state in self._cuda.items():
            torch.cuda.set_rng_state(state, device)
