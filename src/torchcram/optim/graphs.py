"""CUDA graphs of whole training steps, one for each operator.

With small models the GPU waits for the host, all the more with two passes per step. A captured step
runs from beginning to end on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW

from torchcram.capture import captured
from torchcram.layers import local_weights
from torchcram.optim.concurrent import SideStreamPoint
from torchcram.optim.cram import CrAM
from torchcram.optim.sampler import StepPlan
from torchcram.optim.step_state import Backup, RngState
from torchcram.optim.wrapper import Wrapper
from torchcram.sharding import is_sharded

if TYPE_CHECKING:
    from torch import Tensor
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
            same time, provided that they change no common buffer of the model.

    Attributes:
        shared_buffers: Names of the buffers that both passes change, if there are any: the passes
            run one after the other then.

    Raises:
        ValueError: If steps of the optimizer cannot be captured, or if its passes are to run at the
            same time and cannot; see `require_capturable` and `why_not_concurrent`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        body: Callable[[], object],
        *,
        concurrent_passes: bool = False,
    ) -> None:
        require_capturable(model, optimizer)
        if concurrent_passes:
            require_concurrent(optimizer)
        self._optimizer = optimizer
        self._wrapper = optimizer if isinstance(optimizer, Wrapper) else None
        self._cram = cram = optimizer if isinstance(optimizer, CrAM) else None
        self._body = body
        self._device = next(model.parameters()).device
        # two streams in a row are different ones, while torch's own for captures may be any
        self._stream = torch.cuda.Stream(self._device)
        self._side_stream = torch.cuda.Stream(self._device) if concurrent_passes else None
        if cram is not None and cram.check_finite:
            cram._guard.count_on_device(self._device)
        self._rates = [_rate_on(self._device, group) for group in optimizer.param_groups]
        plans = [StepPlan()] if cram is None else cram._sampler.possible(cram.base_step_probability)
        self.shared_buffers: set[str] = set()
        with torch.cuda.device(self._device):
            self._warm_up(model, plans)
            if self.shared_buffers:
                self._side_stream = None
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

    def _warm_up(self, model: nn.Module, plans: list[StepPlan]) -> None:
        current = torch.cuda.current_stream(self._device)
        with _unchanged(model, self._optimizer, self._device):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for plan in plans:
                    for _ in range(WARM_UP):
                        self._run(plan)
            current.wait_stream(self._stream)

    def _capture(self, plan: StepPlan, pool: Any) -> torch.cuda.CUDAGraph:  # noqa: ANN401
        graph = torch.cuda.CUDAGraph()
        # relaxed: meanwhile another stream copies the tables that kernels read
        with (
            _without_gc(),
            _declared_capturable(self._optimizer),
            captured(graph, pool=pool, stream=self._stream, error_mode="relaxed"),
        ):
            self._run(plan)
        return graph

    def _run(self, plan: StepPlan) -> None:
        planned = nullcontext() if self._cram is None else self._cram._sampler.force(plan)
        unrecorded = nullcontext() if self._wrapper is None else self._wrapper.captured()
        with planned, unrecorded, self._concurrent_passes():
            self._body()

    @contextmanager
    def _concurrent_passes(self) -> Iterator[None]:
        """Lets both passes of a step run at the same time in a `with` block, if they are to."""
        cram = self._cram
        if cram is None or self._side_stream is None:
            yield
            return
        with concurrent_passes(cram, self._side_stream) as point:
            yield
        self.shared_buffers |= point.written


@contextmanager
def concurrent_passes(cram: CrAM, stream: torch.cuda.Stream | None) -> Iterator[SideStreamPoint]:
    """Makes steps in a `with` block keep w~ in memory of its own and compute there on `stream`."""
    backup = cram._backup
    assert isinstance(backup, Backup)  # noqa: S101
    cram._backup = point = SideStreamPoint(backup, stream, dict(cram.model.named_buffers()))
    try:
        yield point
    finally:
        cram._backup = backup


def why_not_concurrent(optimizer: Optimizer) -> str | None:
    """Returns why the passes of a step cannot run at the same time, or None if they can."""
    if not isinstance(optimizer, CrAM):
        return f"{type(optimizer).__name__} has no pass at w~"
    if len(optimizer.rule.passes) > 1:
        return f"the passes of {optimizer.rule.name} build on one another"
    if any(map(optimizer._ascends, optimizer.rule.passes)):
        return "the ascent needs the gradient at w first (set rho=0 for none)"
    if any(isinstance(module, nn.RNNBase) for module in optimizer.model.modules()):
        return "recurrent layers need all of their weights in one block of memory"
    return None


def require_concurrent(optimizer: Optimizer) -> None:
    """Raises ValueError if the passes of a step cannot run at the same time."""
    if (reason := why_not_concurrent(optimizer)) is not None:
        raise ValueError(f"the passes at w and at w~ cannot run at the same time: {reason}")


def concurrent_by_default(optimizer: Optimizer, dense: float, compressed: float) -> bool:
    """Returns whether the passes of captured steps run at the same time unless a user decides.

    They do where they can, if the parts of a batch that they see are together no larger than the
    batch: then their activations take no more memory than those of a plain step.

    Args:
        optimizer: Optimizer that takes the steps.
        dense: Share of a batch in the pass at w.
        compressed: Share of a batch in the pass at w~.
    """
    return dense + compressed <= 1 and why_not_concurrent(optimizer) is None


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
    if isinstance(model, DistributedDataParallel) or any(map(is_sharded, model.parameters())):
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
