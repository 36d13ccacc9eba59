"""Whole training steps as CUDA graphs: the host starts them, and is in no one's way.

Small nets leave a GPU waiting for the host, the more so with two passes a step. A captured step
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

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

WARM_UP = 2  # steps of each kind before its capture, for what is set up or tuned at first use


class GraphedStep:
    """Takes training steps by replaying CUDA graphs, one for each operator that may be drawn.

    With `CrAM`, operators are drawn on the host as ever, so that `state_dict` and the masks of
    `mask_interval` are those of a training without graphs. The learning rate of every group becomes
    a tensor: fill it in place, or let a scheduler of torch do so.

    Args:
        model: whose parameters and buffers `body` changes.
        optimizer: `CrAM` or plain, with a fused base optimizer on CUDA.
        body: one whole step, `optimizer.step(closure)` and whatever goes with it. It finds its
            batch in tensors that stay where they are, and does not wait for the device. What it
            changes beside the model and the optimizer is changed by a few steps more, those that
            warm up.

    Raises:
        ValueError: if an operator is a range, which is another one at every step.
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
            cram._guard.reset()  # pinned memory of the last step: none is to be freed in a capture
        pool = torch.cuda.graph_pool_handle()
        self._graphs = {plan: self._capture(plan, pool) for plan in plans}
        torch.cuda.synchronize(self._device)

    def __call__(self) -> None:
        """Takes one step; does not wait for the device."""
        cram = self._cram
        plan = StepPlan() if cram is None else cram._sampler.draw(cram.base_step_probability)
        self._graphs[plan].replay()

    def check(self) -> None:
        """Waits for the device.

        Raises:
            FloatingPointError: if a step since the last call met a gradient that is not finite.
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
        # relaxed: the tables of the kernels are made on another stream meanwhile
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
        with self._cram._sampler.arrange(plan):
            self._body()


@contextmanager
def _without_gc() -> Iterator[None]:
    """Keeps the garbage collector from freeing pinned memory while a graph is captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _prepare(cram: CrAM, device: torch.device) -> None:
    if cram._shard_context.sharded or isinstance(cram.model, DistributedDataParallel):
        raise ValueError("a step over several processes (DDP, FSDP) cannot be captured")
    for operator in cram._sampler.operators:
        if operator.is_range:
            raise ValueError(f"{operator} is another operator at every step: not to be captured")
    if cram.check_finite:
        cram._guard.count_on_device(device)


@contextmanager
def _unchanged(model: nn.Module, optimizer: Optimizer, device: torch.device) -> Iterator[None]:
    """Puts model, optimizer and random numbers back in place after the block.

    State that the optimizer has made meanwhile stays, at zero, which is where it begins.
    """
    held = [*model.parameters(), *model.buffers()]
    before = [tensor.detach().clone() for tensor in held]
    states = {id(tensor): tensor.clone() for tensor in _state_tensors(optimizer)}
    sampled = optimizer._sampler.state_dict() if isinstance(optimizer, CrAM) else None
    random = torch.cuda.get_rng_state(device), torch.get_rng_state()
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
        torch.cuda.set_rng_state(random[0], device)
        torch.set_rng_state(random[1])


def _state_tensors(optimizer: Optimizer) -> list[Tensor]:
    return [
        value
        for entries in optimizer.state.values()
        for value in entries.values()
        if torch.is_tensor(value)
    ]
