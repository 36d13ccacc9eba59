"""A model that is compressed for a while."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchcram.compress import compress_
from torchcram.integrations.adapters import deployed_weights, merged_in_place
from torchcram.sharding import fsdp_modules, reshard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from torchcram.operators import Operator
    from torchcram.weights import Weights


@contextmanager
def compressed_to(target: Operator, model: nn.Module, weights: Weights) -> Iterator[None]:
    """Compresses `model` for a `with` block, adapters merged; then all is as before."""
    weights = deployed_weights(model, weights)
    with _unchanged(model, weights), merged_in_place(model, weights):
        compress_(model, target, weights=weights)
        yield


@contextmanager
def _unchanged(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Puts `weights` and all buffers of `model` back after the block."""
    before = [(t, t.detach().clone()) for t in (*weights.values(), *model.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        torch.clear_autocast_cache()  # which may hold copies of the compressed weights,
        reshard(fsdp_modules(model))  # as FSDP may
