"""What stands for CUDA graphs and streams where there is no GPU."""

from contextlib import contextmanager, nullcontext

import torch

from torchcram.optim.concurrent import (
    BufferWatch,
    SideStreamPoint,
    backup_of,
    require_concurrent,
    require_separate,
    using_backup,
    why_not_concurrent,
)


def apart(cram, stream=None):
    """Makes steps in a `with` block keep w~ in memory of its own."""
    return using_backup(cram, SideStreamPoint(backup_of(cram), stream))


class Replayed:
    """Has the interface of `StepGraphs`; every replay runs the body.

    Passes that a GPU would run at the same time run one after the other, with w~ in memory of its
    own as on the GPU. Buffers are watched at every step.
    """

    made = 0

    def __init__(self, model, optimizer, body, *, concurrent_passes=False):
        type(self).made += 1
        if concurrent_passes:
            require_concurrent(optimizer)
        possible = concurrent_passes is not False and why_not_concurrent(optimizer) is None
        self._model, self._optimizer, self._body = model, optimizer, body
        self._required, self.concurrent_passes = bool(concurrent_passes), possible

    def __call__(self):
        if self._required:
            watch = BufferWatch(backup_of(self._optimizer), (self._model,))
            with using_backup(self._optimizer, watch):
                self._body()
            require_separate(watch.changed)
            return
        with apart(self._optimizer) if self.concurrent_passes else nullcontext():
            self._body()

    def check(self):
        pass


class FakeEvent:
    """An event that nothing waits for."""


class FakeStream:
    """A stream that records what it waited for, and may fail to."""

    def __init__(self, device):
        self.device, self.fails, self.waited = device, False, []

    def record_event(self):
        return FakeEvent()

    def wait_event(self, event):
        self.waited.append(event)

    def wait_stream(self, stream):
        if self.fails:
            raise RuntimeError("the capture was invalidated")
        self.waited.append(stream)


def fake_streams(monkeypatch):
    """Puts streams that do nothing in the place of those of CUDA; returns the current one."""
    first = FakeStream(torch.device("cpu"))
    current = [first]

    @contextmanager
    def on(stream):
        before, current[0] = current[0], stream
        try:
            yield
        finally:
            current[0] = before

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: current[0])
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: current.__setitem__(0, stream))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device=None: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return first
