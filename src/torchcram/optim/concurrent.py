"""The pass at w~ beside the pass at w, on a CUDA stream of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from torchcram.optim.step_state import Backup


class SideStreamPoint:
    """Keeps w~ in memory of its own, so that both passes of a step can run at the same time.

    Without an ascent, w~ = C(w) does not depend on g. In place of a copy of w, which is put back
    later, there is a copy of w that is compressed, and parameters refer to it during the pass at
    w~; w itself never changes. The operator and the pass at w~ are launched on a second stream,
    which starts where the pass at w starts. In a captured step, the GPU runs both side by side;
    eagerly, both wait for the host.

    It has the methods of `Backup`, whose place it takes.

    Args:
        backup: Backup of the optimizer, whose memory w~ is kept in.
        stream: Stream of the pass at w~; None runs it after the pass at w, as on a CPU.
        buffers: Buffers of the model, by name.

    Attributes:
        written: Names of the buffers that a pass at w~ has changed. A pass at w changes them, too,
            so that passes at the same time would race for them.
    """

    def __init__(
        self, backup: Backup, stream: torch.cuda.Stream | None, buffers: Mapping[str, Tensor]
    ) -> None:
        self.written: set[str] = set()
        self._backup = backup
        self._stream = stream
        self._buffers = {name: b for name, b in buffers.items() if not b.is_inference()}
        self._versions: dict[str, int] = {}  # of the buffers, before the pass at w~
        self._start: torch.cuda.Event | None = None  # where the pass at w starts
        self._joined: torch.cuda.Stream | None = None  # stream of the pass at w, during that at w~
        self._dense: list[tuple[Tensor, Tensor]] = []  # parameters, and their data at w

    def start_step(self) -> None:
        """Lets the pass at w~ start here, however long the pass at w takes."""
        if self._stream is not None:
            self._start = torch.cuda.current_stream(self._stream.device).record_event()

    @torch.no_grad()
    def save(self, parameters: Iterable[Tensor]) -> None:
        """Copies `parameters`, makes them refer to the copies, and goes to the second stream."""
        moved = list(parameters)
        if not moved:  # a plain step has no pass at w~
            return
        self._versions = {name: buffer._version for name, buffer in self._buffers.items()}
        if self._stream is not None and self._start is not None:
            self._stream.wait_event(self._start)
            self._joined = torch.cuda.current_stream(self._stream.device)
            torch.cuda.set_stream(self._stream)
        copies = self._backup.memory_for(moved)
        torch._foreach_copy_(copies, moved)
        for parameter, copy in zip(moved, copies, strict=True):
            self._dense.append((parameter, parameter.data))
            parameter.data = copy

    @torch.no_grad()
    def restore(self) -> None:
        """Makes parameters refer to w and goes back to the first stream, which waits for w~."""
        before, self._versions = self._versions, {}
        self.written |= {name for name in before if self._buffers[name]._version != before[name]}
        while self._dense:
            parameter, data = self._dense[-1]
            parameter.data = data
            self._dense.pop()
        if self._stream is not None and self._joined is not None:
            torch.cuda.set_stream(self._joined)
            self._joined.wait_stream(self._stream)
            self._joined = self._start = None
