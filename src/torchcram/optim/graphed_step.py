"""Training steps for your own loop that run as CUDA graphs where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor

from torchcram.batches import check_shares, map_tensors, split_batch, split_unless_short
from torchcram.optim.concurrent import default_concurrency, require_concurrent
from torchcram.optim.cram import CrAM
from torchcram.optim.graphs import StepGraphs, require_capturable

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


class GraphedStep:
    """Takes whole training steps on batches; on a GPU they are replayed as CUDA graphs.

    A step clears the gradients, computes the loss and its gradient, does the same at w~ where the
    optimizer is `CrAM`, and steps the optimizer::

        step = GraphedStep(model, optimizer, lambda batch: loss_function(model(batch[0]), batch[1]))
        for batch in loader:
            loss = step(batch)
            scheduler.step()
        step.check()

    On a GPU the first batch captures the step, with one graph for each operator that may be drawn;
    later batches are copied into the memory that the graphs read. Batches of another shape or
    dtype, such as the last of an epoch, take the same step without a graph, and so do all batches
    on other devices: the same script runs everywhere.

    Captured steps repeat what was computed on the device, not what Python did. What `loss_of` reads
    beside its batch is read once, in the mode (training or eval) that the model was in, and with
    the autocast that was active; printing or counting in it happens once. Only learning rates may
    change: they become tensors, which schedulers of torch fill. If the optimizer loads a state, the
    next batch captures the step anew.

    Args:
        model: Model to train; compile it first if you compile it.
        optimizer: `CrAM`, or a plain optimizer. On a GPU the base optimizer must be SGD without
            dampening, Adam or AdamW, with `fused=True`.
        loss_of: Function that returns the loss of a batch, which is on the device of the model.
            In a captured step it must not wait for the device, as `.item()` does.
        example_batch: Batch with the shapes to capture; by default the first batch.
        dense_share: Share of a batch, its first samples, that the pass at w takes. A last batch
            that is too short for its shares is taken whole by all passes.
        compressed_share: Share of a batch, its last samples, that the passes at w~ take.
        concurrent_passes: Whether captured steps run the passes at w and at w~ at the same time, on
            two streams. That is faster, but the activations of both are in memory. It needs one
            pass at w~ without an ascent, and a model that changes no buffers except those of batch
            norm; with True, anything else is an error. `loss_of` must not write to a tensor that
            the other pass reads or writes, which is not checked. None does so if it is possible and
            the shares add up to at most 1.

    Raises:
        ValueError: If a share is out of range or the optimizer is not `CrAM` and a share is below
            1, if steps of the optimizer cannot be captured: its operator is a range, it replays
            randomness, the model is wrapped by DDP or sharded, or on a GPU the base optimizer is
            another one; or if its passes should run at the same time and cannot.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_of: Callable[[Any], Tensor],
        *,
        example_batch: object = None,
        dense_share: float = 1.0,
        compressed_share: float = 1.0,
        concurrent_passes: bool | None = None,
    ) -> None:
        check_shares(dense_share, compressed_share)
        self._shares = (dense_share, compressed_share)
        if not isinstance(optimizer, CrAM) and self._shares != (1, 1):
            raise ValueError(
                "shares of a batch need CrAM, which has a pass for each; "
                f"{type(optimizer).__name__} takes whole batches"
            )
        self._model = model
        self._optimizer = optimizer
        self._loss_of = loss_of
        self._device = next(model.parameters()).device
        self._captures = self._device.type == "cuda"
        require_capturable(model, optimizer)
        if concurrent_passes:
            require_concurrent(optimizer)
        if concurrent_passes is None:
            concurrent_passes = default_concurrency(*self._shares)
        self._concurrent_passes = concurrent_passes
        self._shape = None if example_batch is None else _shape_of(example_batch)
        self._graphs: StepGraphs | None = None
        self._training = model.training  # mode of the model when the graphs were captured
        self._batch: Any = None  # what the graphs read
        self._loss: Tensor | None = None  # what they write
        base: Optimizer = getattr(optimizer, "base", optimizer)
        base.register_load_state_dict_post_hook(_graph_dropper(self))

    def __call__(self, batch: object) -> Tensor:
        """Takes a step on a batch; returns the loss at w, without waiting for the device.

        Args:
            batch: Tensor, or tuples, lists and mappings of tensors, on any device. A tensor in
                pinned memory is copied while the GPU works.

        Raises:
            TypeError: If the loss is not a tensor of one element that depends on the parameters.
            ValueError: If a batch cannot be split into the shares, holds objects that are neither
                tensors nor plain values, or if the model's mode or an option of the optimizer other
                than the learning rate has changed since the capture.
        """
        shape = _shape_of(batch)
        if self._shape is None:
            self._shape = shape
        if not self._captures or shape != self._shape:
            return self._step_eagerly(batch, split=_split_of(shape == self._shape))
        if self._graphs is None:
            graphs = self._capture(batch)
        else:
            graphs = self._graphs
            _copy_(self._batch, batch)
        if self._model.training is not self._training:
            modes = {True: "training", False: "eval"}
            raise ValueError(
                f"the step was captured in {modes[self._training]} mode, and the model is in "
                f"{modes[self._model.training]} mode now: call model.train({self._training})"
            )
        graphs()
        assert self._loss is not None  # noqa: S101
        return self._loss.clone()

    def check(self) -> None:
        """Waits for the device and checks the steps since the last call.

        Raises:
            FloatingPointError: If a gradient in one of them was NaN or infinite; `CrAM` has not
                taken that step. Elsewhere than on a GPU the step itself raises this error.
        """
        if not isinstance(self._optimizer, CrAM):
            return
        try:
            self._optimizer._guard.raise_if_skipped()
        except FloatingPointError:
            self._graphs = None
            raise

    def _capture(self, batch: object) -> StepGraphs:
        self.check()  # capturing forgets what has not been reported
        self._training, self._loss = self._model.training, None
        # memory of its own, which later batches are copied into
        self._batch = map_tensors(
            batch, lambda tensor: torch.empty_like(tensor, device=self._device)
        )
        _copy_(self._batch, batch)
        self._graphs = StepGraphs(
            self._model,
            self._optimizer,
            self._step_on_copy,
            concurrent_passes=self._concurrent_passes,
        )
        return self._graphs

    def _step_eagerly(self, batch: object, split: Callable[..., Any]) -> Tensor:
        """Takes a step without a graph, possibly between captured ones."""
        moved = map_tensors(batch, lambda tensor: tensor.to(self._device, non_blocking=True))
        try:
            return self._step_on(moved, split)
        except BaseException:
            self._graphs = None  # an error forgets the masks that the graphs keep
            raise

    def _step_on_copy(self) -> None:
        loss = self._step_on(self._batch)
        if self._loss is None:
            self._loss = torch.empty_like(loss)
        self._loss.copy_(loss)

    def _step_on(self, batch: Any, split: Callable[..., Any] = split_batch) -> Tensor:  # noqa: ANN401
        """Takes a step, one kernel at a time or in a capture."""
        torch.clear_autocast_cache()  # may hold copies of weights that an earlier step has changed
        parts = (batch,) if self._shares == (1, 1) else split(batch, *self._shares)
        step: Callable[..., Any] = self._optimizer.step
        loss: Tensor = step(*map(self._closure_on, parts))
        return loss

    def _closure_on(self, part: object) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            self._optimizer.zero_grad()
            loss = self._loss_of(part)
            if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
                raise TypeError(
                    "loss_of must return the loss, a tensor of one element that depends on the "
                    f"parameters, got {_described(loss)}"
                )
            loss.backward()
            return loss.detach()  # the graph of this pass is not to live on in the next one

        return closure


def _split_of(usual: bool) -> Callable[..., Any]:
    """Returns the function that splits a batch; one of an unusual shape may be too short for it."""
    return split_batch if usual else split_unless_short


def _graph_dropper(step: GraphedStep) -> Callable[[Optimizer], None]:
    """Returns a hook that drops the graphs of a step, but does not keep the step alive."""
    held = ref(step)

    def drop_graphs(_: Optimizer) -> None:
        if (step := held()) is not None:
            step._graphs = None

    return drop_graphs


def _described(loss: object) -> str:
    if not isinstance(loss, Tensor):
        return type(loss).__name__
    dependent = "with" if loss.requires_grad else "without"
    return f"a tensor of shape {tuple(loss.shape)} {dependent} a gradient"


def _shape_of(batch: object) -> Hashable:
    """Returns what two batches must have in common to be computed by the same graph.

    Raises:
        ValueError: If a batch holds objects that are neither tensors nor plain values.
    """
    if isinstance(batch, Tensor):
        return tuple(batch.shape), batch.dtype
    if isinstance(batch, Mapping):
        return type(batch), tuple((key, _shape_of(value)) for key, value in batch.items())
    if isinstance(batch, (tuple, list)):
        return type(batch), tuple(_shape_of(part) for part in batch)
    if batch is None or isinstance(batch, (bool, int, float, str)):
        return type(batch), batch
    raise ValueError(
        f"a batch holds a {type(batch).__name__}; allowed: tensors, and tuples, lists and mappings "
        "of tensors and plain values (None, numbers and texts)"
    )


def _copy_(copy: Any, batch: Any) -> None:  # noqa: ANN401
    """Copies the tensors of a batch into those of another, without waiting for the device."""
    if isinstance(copy, Tensor):
        copy.copy_(batch, non_blocking=True)
    elif isinstance(copy, Mapping):
        for key, value in copy.items():
            _copy_(value, batch[key])
    elif isinstance(copy, (tuple, list)):
        for part, value in zip(copy, batch, strict=True):
            _copy_(part, value)
