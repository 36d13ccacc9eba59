"""One-shot compression of a model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import torch
from torch import nn

from torchcram.operators import Operator, as_operator
from torchcram.operators.base import require_shard_support
from torchcram.sharding import fsdp_modules
from torchcram.trained import copy_marks, warn_of_untrained
from torchcram.weights import copy_coverage_warning, weights_in

if TYPE_CHECKING:
    from torchcram.weights import Masks, Weights


@torch.no_grad()
def compress_(
    model: nn.Module, operator: Operator | str, *, weights: Weights | None = None
) -> Masks | None:
    """Compresses `model` in place and returns the masks, or None if the operator has none.

    If FSDP has sharded the model, all ranks must call it, and each gets the masks of its shards.

    Args:
        model: Model to compress.
        operator: Operator, or its text, such as "global:0.9".
        weights: Weights to compress; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If the operator is a range of sparsities, which only training can use, or if it
            does not support the shards of the model.
    """
    operator = as_operator(operator)
    if operator.is_range:
        raise ValueError(f"{operator} is a range to train over; to compress, give one sparsity")
    chosen = weights_in(model, weights)
    if chosen.sharded:
        require_shard_support([operator])
    warn_of_untrained(chosen)
    masks = operator.compress_(chosen.local())
    torch.clear_autocast_cache()  # it may hold copies of the weights
    return masks


def compress(
    model: nn.Module, operator: Operator | str, *, weights: Weights | None = None
) -> nn.Module:
    """Returns a compressed copy of `model`, which stays unchanged; see `compress_`."""
    operator = as_operator(operator)
    if fsdp_modules(model):
        raise ValueError("a model sharded by FSDP cannot be copied: compress_() it in place")
    names = weights_in(model, weights).keys()
    twin = copy.deepcopy(model)
    for module in twin.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN needs all weights in one buffer
    copy_coverage_warning(model, twin)
    copy_marks(model, twin)
    parameters = dict(twin.named_parameters())
    compress_(twin, operator, weights={name: parameters[name] for name in names})
    return twin
