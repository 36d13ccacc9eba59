"""CUDA graphs of whole training steps, one for each operator.

With small models the GPU waits for the host, all the more with two passes per step. A captured step
runs from beginning to end on the device.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from torchcram.capture import capturing
from torchcram.layers import local_weights
from torchcram.optim.concurrent import (
    BufferWatch,
    SideStreamPoint,
    backup_of,
    require_concurrent,
    require_separate,
    using_backup,
    why_not_concurrent,
)
from torchcram.optim.cram import CrAM
from torchcram.optim.sampler import StepPlan
from torchcram.optim.step_state import RngState
from torchcram.optim.wrapper import Wrapper
from torchcram.sharding import has_shards

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

WARM_UP = 2  # steps with each plan before its capture: the first uses set up and tune kernels


class StepGraphs:
    """Takes training steps by replaying CUDA graphs, one for each operator that may be drawn.

    This is the layer below `GraphedStep`, for steps whose batches are made on the device. With
    `CrAM`, operators are still drawn on the host, so that `state_dict` and the masks of
    `mask_interval` are the same as in training without graphs. The learning rate of every group
    becomes a tensor: fill it in place, or let a scheduler of torch do so.

    Args:
        model: Model whose parameters and buffers `body` changes.
        optimizer: `CrAM`, or a plain optimizer; the base optimizer must be fused and on CUDA.
        body: Function that takes one whole step: `optimizer.step(closure)` and whatever goes with
            it. It reads its batch from tensors that keep their memory, and does not wait for the
            device. Warm-up calls it a few times more; what it changes beside the model and the
            optimizer keeps the changes of these calls.
        concurrent_passes: Whether the passes of `optimizer.step(closure)` at w and at w~ run at the
            same time; None runs them so if they can.

    Attributes:
        concurrent_passes: Whether the passes run at the same time.

    Raises:
        ValueError: If steps of the optimizer cannot be captured (see `require_capturable`), or if
            `concurrent_passes` is True and its passes cannot run at the same time: they depend on
            one another, or change buffers of the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        body: Callable[[], object],
        *,
        concurrent_passes: bool | None = False,
    ) -> None:
        require_capturable(model, optimizer)
        if concurrent_passes:
            require_concurrent(optimizer)
        self._optimizer = optimizer
        self._wrapper = optimizer if isinstance(optimizer, Wrapper) else None
        self._cram = cram = optimizer if isinstance(optimizer, CrAM) else None
        self._body = body
        self._device = next(model.parameters()).device
        self._stream, self._side_stream = _streams(self._device)
        self.concurrent_passes = False
        if cram is not None and cram.check_finite:
            cram._guard.count_on_device(self._device)
        self._rates = [_rate_on(self._device, group) for group in optimizer.param_groups]
        plans = [StepPlan()] if cram is None else cram._sampler.possible(cram.base_step_probability)
        with torch.cuda.device(self._device):
            with _unchanged(model, optimizer, self._device), self._on_stream_of_captures():
                if concurrent_passes is not False and why_not_concurrent(optimizer) is None:
                    changed = self._watch_buffers(model, plans[0])
                    if concurrent_passes:
                        require_separate(changed)
                    self.concurrent_passes = not changed
                for plan in plans * WARM_UP:
                    self._run(plan)
            if cram is not None:
                cram._guard.reset()  # frees pinned memory now rather than during a capture
            pool = torch.cuda.graph_pool_handle()
            self._graphs = {plan: self._capture(plan, pool) for plan in plans}
            torch.cuda.synchronize(self._device)
        self._options = _options(optimizer)

    def __call__(self) -> None:
        """Takes one step, without waiting for the device.

        Raises:
            ValueError: If an option of the optimizer other than the learning rate has changed since
                the capture, which graphs do not notice.
        """
        self._read_rates()
        if self._wrapper is not None:
            self._wrapper.before_replay()
        cram = self._cram
        if cram is None:
            plan = StepPlan()
        else:
            plan = cram._sampler.draw(cram.base_step_probability)
            cram._step_state.plan = plan
        self._graphs[plan].replay()

    def check(self) -> None:
        """Waits for the device and checks the steps since the last call.

        Raises:
            FloatingPointError: If a gradient in one of them was NaN or infinite.
        """
        if self._cram is not None:
            self._cram._guard.raise_if_skipped()

    def _read_rates(self) -> None:
        """Fills the tensors that graphs read with learning rates that were assigned to groups."""
        groups = self._optimizer.param_groups
        if (options := _options(self._optimizer)) != self._options:
            raise ValueError(
                f"{_difference(self._options, options)} after the step was captured; only learning "
                "rates may change: create GraphedStep anew, or let schedulers leave the momentum "
                "alone (cycle_momentum=False)"
            )
        for group, rate in zip(groups, self._rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate

    @contextmanager
    def _on_stream_of_captures(self) -> Iterator[None]:
        """Runs a `with` block on the stream that steps are captured on."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def _watch_buffers(self, model: nn.Module, plan: StepPlan) -> set[str]:
        """Takes a step; returns the buffers that concurrent passes would race for."""
        assert self._cram is not None  # noqa: S101
        watch = BufferWatch(backup_of(self._cram), (model, self._cram.model))
        with using_backup(self._cram, watch):
            self._run(plan)
        return watch.changed

    def _capture(self, plan: StepPlan, pool: Any) -> torch.cuda.CUDAGraph:  # noqa: ANN401
        graph = torch.cuda.CUDAGraph()
        # relaxed: meanwhile another stream copies the tables that kernels read
        with (
            _without_gc(),
            _declared_capturable(self._optimizer),
            capturing(graph, pool=pool, stream=self._stream, error_mode="relaxed"),
        ):
            self._run(plan)
        return graph

    def _run(self, plan: StepPlan) -> None:
        planned = nullcontext() if self._cram is None else self._cram._sampler.force(plan)
        unrecorded = nullcontext() if self._wrapper is None else self._wrapper.captured()
        with planned, unrecorded, self._concurrently():
            self._body()

    def _concurrently(self) -> AbstractContextManager[None]:
        """Lets both passes of a step run at the same time in a `with` block, if they are to."""
        if self._cram is None or not self.concurrent_passes:
            return nullcontext()
        point = SideStreamPoint(backup_of(self._cram), self._side_stream)
        return using_backup(self._cram, point)


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Returns the stream that steps are captured on, and another one for passes beside it.

    The same for all steps on a device: libraries keep memory for every stream that they have seen.
    """
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    while streams[0] == streams[1]:  # torch hands out the same streams again and again
        streams[1] = torch.cuda.Stream(device)
    return streams[0], streams[1]


def is_capturable(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer, or the one that it wraps, can be captured as a CUDA graph.

    SGD, Adam and AdamW can: fused, they do not wait for the host, and their state begins at zero.
    With dampening, the first step of SGD differs from all others, so that it cannot.
    """
    base: Optimizer = getattr(optimizer, "base", optimizer)
    dampened = any(group.get("dampening") for group in base.param_groups)
    return type(base) in (SGD, Adam, AdamW) and not dampened


def require_capturable(model: nn.Module, optimizer: Optimizer) -> None:
    """Raises ValueError if steps cannot be captured as CUDA graphs.

    A model on another device is checked for what does not depend on the device, so that a program
    fails before it comes to a GPU.
    """
    if isinstance(model, DistributedDataParallel) or has_shards(model):
        raise ValueError("a step over several processes (DDP, FSDP) cannot be captured")
    if isinstance(optimizer, CrAM):
        _require_same_steps(optimizer)
    if not getattr(optimizer, "capturable_steps", True):
        name = type(optimizer).__name__
        raise ValueError(f"steps of {name} differ from one another and cannot be captured")
    base: Optimizer = getattr(optimizer, "base", optimizer)
    if not is_capturable(optimizer):
        raise ValueError(
            f"a step of this {type(base).__name__} cannot be captured; allowed: SGD without "
            "dampening, Adam and AdamW, fused"
        )
    on_cuda = next(model.parameters()).is_cuda
    if on_cuda and not all(group.get("fused") for group in base.param_groups):
        raise ValueError(
            f"a step of this {type(base).__name__} cannot be captured, for the host would have to "
            "wait for the device: use a fused optimizer (fused=True)"
        )


def _require_same_steps(cram: CrAM) -> None:
    """Raises ValueError if steps of an optimizer are not always the same work."""
    if isinstance(cram.model, DistributedDataParallel):
        raise ValueError("a step over several processes (DDP, FSDP) cannot be captured")
    if cram.replay_randomness:
        raise ValueError("steps with replay_randomness=True cannot be captured")
    for operator in cram.operators:
        if operator.is_range:
            raise ValueError(f"{operator} is another operator at every step and cannot be captured")


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disables the garbage collector, which could free pinned memory during a capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _declared_capturable(optimizer: Optimizer) -> Iterator[None]:
    """Sets the option that torch requires of Adam and AdamW in a capture, also of fused ones."""
    groups = [group for group in optimizer.param_groups if "capturable" in group]
    before = [group["capturable"] for group in groups]
    for group in groups:
        group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(groups, before, strict=True):
            group["capturable"] = value


def _rate_on(device: torch.device, group: dict[str, Any]) -> Tensor:
    """Makes the learning rate of a group a tensor on `device`, and returns it."""
    rate = group["lr"]
    if not torch.is_tensor(rate) or rate.device != device or rate.dtype != torch.float32:
        group["lr"] = rate = torch.tensor(float(rate), device=device)
    return rate


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Returns the options of every group that graphs do not read anew."""
    names = [name for name in optimizer.defaults if name != "lr"]
    rho = getattr(optimizer, "rho", None)
    return [
        {
            "the number of parameters": len(group["params"]),
            "rho": group.get("rho", rho),
            **{name: group[name] for name in names if name in group},
        }
        for group in optimizer.param_groups
    ]


def _difference(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """Returns the first difference between the options of groups, in words."""
    if len(before) != len(after):
        return f"parameter groups were {len(before)} and have become {len(after)}"
    return next(
        f"{name} of parameter group {number} was {old.get(name)} and has become {new.get(name)}"
        for number, (old, new) in enumerate(zip(before, after, strict=True))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    )


@contextmanager
def _unchanged(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Restores model, optimizer and random generators after a `with` block.

    State that the optimizer creates inside the block stays, filled with zeros, its initial value.
    """
    kept = optimizer.kept_tensors() if isinstance(optimizer, Wrapper) else []
    held = [*model.parameters(), *model.buffers(), *kept]
    before = [tensor.detach().clone() for tensor in held]
    states = {id(tensor): tensor.clone() for tensor in _state_tensors(optimizer)}
    sampled = optimizer._sampler.state_dict() if isinstance(optimizer, CrAM) else None
    rng_state = RngState([device])
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in zip(held, before, strict=True):
                tensor.copy_(value)
            for tensor in _state_tensors(optimizer):
                if id(tensor) in states:
                    tensor.copy_(states[id(tensor)])
                else:
                    tensor.zero_()
        if isinstance(optimizer, CrAM) and sampled is not None:
            optimizer._sampler.rewind(sampled, local_weights(optimizer.weights))
        optimizer.zero_grad()
        rng_state.restore()


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [
        value
        for entries in optimizer.state.values()
        for value in entries.values()
        if torch.is_tensor(value)
    ]
