"""Whole training steps as CUDA graphs.

With small models the GPU waits for the host, all the more with two passes per step. A captured step
runs from beginning to end on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torchcram.layers import local_weights
from torchcram.optim.cram import CrAM
from torchcram.optim.sampler import StepPlan
from torchcram.optim.step_state import RngState

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

WARM_UP = 2  # steps with each plan before its capture: the first uses set up and tune kernels


class GraphedStep:
    """Takes training steps by replaying CUDA graphs, one for each operator that may be drawn.

    With `CrAM`, operators are still drawn on the host, so that `state_dict` and the masks of
    `mask_interval` are the same as in training without graphs. The learning rate of every group
    becomes a tensor: fill it in place, or let a scheduler of torch do so.

    Args:
        model: Model whose parameters and buffers `body` changes.
        optimizer: `CrAM`, or a plain optimizer; the base optimizer must be fused and on CUDA.
        body: Function that takes one whole step: `optimizer.step(closure)` and whatever goes with
            it. It reads its batch from tensors that keep their memory, and does not wait for the
            device. Warm-up calls it a few times more; what it changes beside the model and the
            optimizer keeps the changes of these calls.

    Raises:
        ValueError: If an operator is a range, whose sparsity changes from step to step, or the
            model is wrapped by DDP or sharded.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, body: Callable[[], object]) -> None:
        self._optimizer = optimizer
        self._cram = optimizer if isinstance(optimizer, CrAM) else None
        self._body = body
        self._device = next(model.parameters()).device
        if self._cram is not None:
            _prepare(self._cram, self._device)
        for group in optimizer.param_groups:
            if not torch.is_tensor(group["lr"]):
                group["lr"] = torch.tensor(float(group["lr"]), device=self._device)
            if "capturable" in group:
                group["capturable"] = True
        cram = self._cram
        plans = [StepPlan()] if cram is None else cram._sampler.possible(cram.base_step_probability)
        self._warm_up(model, plans)
        if cram is not None:
            cram._guard.reset()  # frees pinned memory now rather than during a capture
        pool = torch.cuda.graph_pool_handle()
        self._graphs = {plan: self._capture(plan, pool) for plan in plans}
        torch.cuda.synchronize(self._device)

    def __call__(self) -> None:
        """Takes one step, without waiting for the device."""
        cram = self._cram
        plan = StepPlan() if cram is None else cram._sampler.draw(cram.base_step_probability)
        self._graphs[plan].replay()

    def check(self) -> None:
        """Waits for the device and checks the steps since the last call.

        Raises:
            FloatingPointError: If a gradient in one of them was NaN or infinite.
        """
        if self._cram is not None:
            self._cram._guard.raise_if_skipped()

    def _warm_up(self, model: nn.Module, plans: list[StepPlan]) -> None:
        current = torch.cuda.current_stream(self._device)
        side = torch.cuda.Stream(self._device)
        with _unchanged(model, self._optimizer, self._device):
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for plan in plans:
                    for _ in range(WARM_UP):
                        self._run(plan)
            current.wait_stream(side)

    def _capture(self, plan: StepPlan, pool: Any) -> torch.cuda.CUDAGraph:  # noqa: ANN401
        graph = torch.cuda.CUDAGraph()
        # relaxed: meanwhile another stream copies the tables that kernels read
        with (
            _without_gc(),
            torch.cuda.graph(graph, pool=pool, capture_error_mode="relaxed"),
        ):
            self._run(plan)
        return graph

    def _run(self, plan: StepPlan) -> None:
        if self._cram is None:
            self._body()
            return
        with self._cram._sampler.force(plan):
            self._body()


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


def _prepare(cram: CrAM, device: torch.device) -> None:
    """Raises ValueError if steps of `cram` cannot be captured; counts skipped steps on `device`."""
    if cram._shard_context.sharded or isinstance(cram.model, DistributedDataParallel):
        raise ValueError("a step over several processes (DDP, FSDP) cannot be captured")
    for operator in cram._sampler.operators:
        if operator.is_range:
            raise ValueError(f"{operator} is another operator at every step and cannot be captured")
    if cram.check_finite:
        cram._guard.count_on_device(device)


@contextmanager
def _unchanged(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Restores model, optimizer and random generators after a `with` block.

    State that the optimizer creates inside the block stays, filled with zeros, its initial value.
    """
    held = [*model.parameters(), *model.buffers()]
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
