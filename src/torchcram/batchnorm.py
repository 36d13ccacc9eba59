"""Batch-norm statistics: frozen at a perturbed point, estimated anew after compression."""

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


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Normalises by batch statistics as in training, but updates no running buffer meanwhile.

    Covers every batch norm (SyncBatchNorm included) and instance norm; layers in eval mode go on as
    they are.
    """
    layers: list[_NormBase] = []
    modules = [model]
    while modules:  # several times faster than model.modules(), and done at every step
        module = modules.pop()
        modules.extend(child for child in module._modules.values() if child is not None)
        if isinstance(module, _NormBase) and module.training and module.track_running_stats:
            layers.append(module)
    # instance norm updates its buffers whatever the flag says, so they are taken away meanwhile
    taken = [(layer, dict(layer._buffers)) for layer in layers if isinstance(layer, _InstanceNorm)]
    try:
        for layer in layers:
            layer.track_running_stats = False
        for layer, buffers in taken:
            layer._buffers.update(dict.fromkeys(buffers))
        yield
    finally:
        for layer in layers:
            layer.track_running_stats = True
        for layer, buffers in taken:
            layer._buffers.update(buffers)


@torch.no_grad()
def tune_batchnorm_(
    model: nn.Module, batches: Iterable[Any], *, momentum: float | None = None
) -> None:
    """Estimates the running statistics of all batch-norm layers anew, from `batches`.

    A compressed network sees other activations than the one its statistics were gathered on. About
    1000 training samples, with training augmentation, put that right. Layers other than batch norm
    run in eval mode, so nothing else changes; all modes and momenta are put back. A model without
    running statistics is left as it is, without looking at `batches`.

    Args:
        model: in any mode.
        batches: inputs, or tuples that begin with the inputs, or mappings of keyword arguments;
            they are moved to the device of the model.
        momentum: of the running average; None for the plain average over all batches.

    Raises:
        ValueError: if `batches` is empty; the statistics are as before then, and after any other
            error too.
    """
    layers = [
        m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None
    ]
    if not layers:
        return
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
