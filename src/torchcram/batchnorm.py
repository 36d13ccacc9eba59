"""Running statistics of norm layers: freezing them, and estimating them anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm

from torchcram.passes import eval_mode, forward


class FrozenStatistics:
    """Running statistics of a model, which `freeze` stops and `restore` starts again.

    Covers every batch norm (SyncBatchNorm included) and instance norm in training mode. `restore`
    may be called at any time and any number of times.

    Args:
        model: Model whose norm layers are frozen.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[_NormBase] = []
        modules = [model]
        while modules:  # several times faster than model.modules(), and done at every step
            module = modules.pop()
            modules.extend(child for child in module._modules.values() if child is not None)
            if isinstance(module, _NormBase) and module.training and module.track_running_stats:
                self._layers.append(module)
        # instance norm updates its buffers whatever the flag says, so `freeze` removes them
        self._buffers = [
            (layer, dict(layer._buffers))
            for layer in self._layers
            if isinstance(layer, _InstanceNorm)
        ]

    def freeze(self) -> None:
        """Makes layers normalise by batch statistics without updating a running buffer."""
        for layer in self._layers:
            layer.track_running_stats = False
        for layer, buffers in self._buffers:
            layer._buffers.update(dict.fromkeys(buffers))

    def restore(self) -> None:
        """Makes layers update their running buffers again."""
        for layer in self._layers:
            layer.track_running_stats = True
        for layer, buffers in self._buffers:
            layer._buffers.update(buffers)


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Normalises by batch statistics, but updates no running buffer, inside a `with` block.

    Covers every batch norm (SyncBatchNorm included) and instance norm; layers in eval mode are not
    affected.
    """
    statistics = FrozenStatistics(model)
    try:
        statistics.freeze()
        yield
    finally:
        statistics.restore()


@torch.no_grad()
def tune_batchnorm_(
    model: nn.Module, batches: Iterable[Any], *, momentum: float | None = None
) -> None:
    """Estimates the running statistics of all batch-norm layers anew, from `batches`.

    A compressed network has other activations than the network that its statistics come from. About
    1000 training samples, with training augmentation, correct that. Layers other than batch norm
    run in eval mode, so nothing else changes; all modes and momenta are restored. A model without
    running statistics is left unchanged, and `batches` is not read.

    Args:
        model: Model in any mode.
        batches: Inputs, or tuples that begin with the inputs, or mappings of keyword arguments;
            they are moved to the device of the model.
        momentum: Momentum of the running average; None for the plain average over all batches.

    Raises:
        ValueError: If `batches` is empty. After this and any other error the statistics are as
            before.
    """
    layers = [
        m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None
    ]
    if not layers:
        return
    if isinstance(batches, torch.Tensor):
        raise ValueError("batches is a tensor; allowed: an iterable of batches, such as [tensor]")
    iterator = iter(batches)
    try:
        first = next(iterator)
    except StopIteration:
        raise ValueError("tune_batchnorm_ needs at least one batch, and got none") from None
    momenta = [(layer, layer.momentum) for layer in layers]
    before = [(buffer, buffer.clone()) for layer in layers for buffer in layer.buffers()]
    try:
        with eval_mode(model):
            for layer in layers:
                layer.train()
                layer.momentum = momentum
                layer.reset_running_stats()
            for batch in chain([first], iterator):
                forward(model, batch)
    except BaseException:
        for buffer, value in before:
            buffer.copy_(value)
        raise
    finally:
        for layer, old in momenta:
            layer.momentum = old
