"""The pass at w~ beside the pass at w, on a CUDA stream of its own."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from torchcram.messages import list_names
from torchcram.optim.cram import CrAM
from torchcram.optim.step_state import Backup

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from torchcram.optim.step_state import WeightBackup


class SideStreamPoint:
    """Keeps w~ in memory of its own, so that both passes of a step can run at the same time.

    `Backup` lets w be compressed in place and copies it back afterwards. This class lets a copy be
    compressed instead, and points `.data` of the parameters at the copy during the pass at w~, so
    that w is never written. That pass and the operator before it are launched on a second stream,
    which starts where the pass at w starts: without an ascent, C(w) does not depend on g. In a
    captured step the GPU runs both passes at the same time.

    Args:
        backup: Backup of the optimizer, whose memory w~ is kept in.
        stream: Stream of the pass at w~; None runs it after the pass at w, as on a CPU.
    """

    def __init__(self, backup: Backup, stream: torch.cuda.Stream | None) -> None:
        self._backup = backup
        self._stream = stream
        self._start: torch.cuda.Event | None = None  # where the pass at w starts
        self._first: torch.cuda.Stream | None = None  # stream of the pass at w, during that at w~
        self._dense: list[tuple[Tensor, Tensor]] = []  # parameters, and their data at w

    def start_step(self) -> None:
        """Lets the pass at w~ start here, however long the pass at w takes."""
        if self._stream is not None:
            self._start = torch.cuda.current_stream(self._stream.device).record_event()

    @torch.no_grad()
    def save(self, parameters: Iterable[Tensor]) -> None:
        """Goes to the second stream, copies `parameters` and makes them refer to the copies."""
        moved = list(parameters)
        if not moved:  # a plain step has no pass at w~
            return
        if self._stream is not None and self._start is not None:
            self._first = torch.cuda.current_stream(self._stream.device)
            self._stream.wait_event(self._start)
            torch.cuda.set_stream(self._stream)
        copies = self._backup.memory_for(moved)
        torch._foreach_copy_(copies, moved)
        for parameter, copy in zip(moved, copies, strict=True):
            self._dense.append((parameter, parameter.data))
            parameter.data = copy

    @torch.no_grad()
    def restore(self) -> None:
        """Makes parameters refer to w and goes back to the first stream, which waits for w~."""
        while self._dense:
            parameter, data = self._dense[-1]
            parameter.data = data
            self._dense.pop()
        first, self._first, self._start = self._first, None, None
        if self._stream is None or first is None:
            return
        if torch.cuda.current_stream(self._stream.device) == self._stream:
            torch.cuda.set_stream(first)
        first.wait_stream(self._stream)


class BufferWatch:
    """Takes the place of `Backup` in one step, and finds buffers that concurrent passes race for.

    Such buffers are those that change in the pass at w~, and those that change in the pass at w,
    which the other pass may read. Running statistics of the norm layers of torch are none of them:
    `CrAM` freezes them at w~, where they are neither written nor read.

    Args:
        backup: Backup of the optimizer.
        models: Models whose buffers are watched.

    Attributes:
        changed: Names of the buffers that were found.
    """

    def __init__(self, backup: Backup, models: Iterable[nn.Module]) -> None:
        self.changed: set[str] = set()
        self._backup = backup
        self._at_w: dict[str, Tensor] = {}
        self._at_compressed: dict[str, Tensor] = {}
        for model in models:
            self._at_compressed |= dict(model.named_buffers())
            self._at_w |= _without_statistics(model)
        self._before: dict[str, tuple[int, Tensor]] = {}

    def start_step(self) -> None:
        """Remembers the buffers before the pass at w."""
        self._before = _snapshot(self._at_w)

    def save(self, parameters: Iterable[Tensor]) -> None:
        """Compares the buffers after the pass at w, and remembers them before that at w~."""
        self.changed |= _changed(self._at_w, self._before)
        self._before = _snapshot(self._at_compressed)
        self._backup.save(parameters)

    def restore(self) -> None:
        """Compares the buffers after the pass at w~."""
        self._backup.restore()
        before, self._before = self._before, {}
        self.changed |= _changed(self._at_compressed, before)


def _without_statistics(model: nn.Module) -> dict[str, Tensor]:
    """Returns the buffers of a model, except those of the norm layers of torch itself."""
    return {
        f"{path}.{name}" if path else name: buffer
        for path, module in model.named_modules()
        if not (isinstance(module, _NormBase) and type(module).__module__.startswith("torch.nn."))
        for name, buffer in module.named_buffers(recurse=False)
    }


def _snapshot(buffers: Mapping[str, Tensor]) -> dict[str, tuple[int, Tensor]]:
    """Returns version and value of every buffer: some functions write without counting it."""
    return {name: (_version(buffer), buffer.clone()) for name, buffer in buffers.items()}


def _changed(buffers: Mapping[str, Tensor], before: dict[str, tuple[int, Tensor]]) -> set[str]:
    return {
        name
        for name, (version, value) in before.items()
        if _version(buffers[name]) != version or not _equal(buffers[name], value)
    }


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _equal(tensor: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors have the same bits; of sparse ones, only the version tells."""
    if tensor.layout != torch.strided:
        return True
    return tensor.shape == other.shape and bool(torch.equal(_bytes(tensor), _bytes(other)))


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def using_backup(cram: CrAM, other: WeightBackup) -> Iterator[None]:
    """Replaces the backup of an optimizer by another one for a `with` block."""
    backup = cram._backup
    cram._backup = other
    try:
        yield
    finally:
        cram._backup = backup


def backup_of(cram: CrAM) -> Backup:
    """Returns the backup of an optimizer, outside of `using_backup`."""
    assert isinstance(cram._backup, Backup)  # noqa: S101
    return cram._backup


def why_not_concurrent(optimizer: Optimizer) -> str | None:
    """Returns why the passes of a step cannot run at the same time, or None if they may.

    What the passes write is not known before they have run; see `BufferWatch`.
    """
    if not isinstance(optimizer, CrAM):
        return f"{type(optimizer).__name__} has no pass at w~"
    if len(optimizer.rule.passes) > 1:
        return f"the passes of {optimizer.rule.name} build on one another"
    if any(map(optimizer._ascends, optimizer.rule.passes)):
        return "the ascent needs the gradient at w first (set rho=0 for none)"
    if names := _shared_weights(optimizer):
        return (
            "other tensors of the model share memory with its weights, as in recurrent layers: "
            f"{list_names(names)}"
        )
    return None


def _shared_weights(cram: CrAM) -> list[str]:
    """Returns the names of weights that other parameters or buffers of the model are a part of."""
    owners = {id(t): t for t in (*cram.model.parameters(), *cram.model.buffers())}
    owners |= {id(weight): weight for weight in cram.weights.values()}
    uses = Counter(map(_address, owners.values()))
    return [name for name, weight in cram.weights.items() if uses[_address(weight)] > 1]


def _address(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


def default_concurrency(dense: float, compressed: float) -> bool | None:
    """Returns what `concurrent_passes` is unless the user decides: None, for where it is possible.

    It is False if the parts of a batch that the passes see are together larger than the batch:
    their activations would take more memory than those of a plain step.

    Args:
        dense: Share of a batch in the pass at w.
        compressed: Share of a batch in the pass at w~.
    """
    return None if dense + compressed <= 1 else False


def require_concurrent(optimizer: Optimizer) -> None:
    """Raises ValueError if the passes of a step cannot run at the same time."""
    if (reason := why_not_concurrent(optimizer)) is not None:
        raise ValueError(f"{NOT_CONCURRENT}: {reason}")


def require_separate(buffers: Iterable[str]) -> None:
    """Raises ValueError if there are buffers that concurrent passes would race for."""
    if names := sorted(buffers):
        raise ValueError(f"{NOT_CONCURRENT}: they change buffers of the model: {list_names(names)}")


NOT_CONCURRENT = "the passes at w and at w~ cannot run at the same time"
