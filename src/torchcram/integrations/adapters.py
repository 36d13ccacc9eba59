"""Models that are compressed for a while, and the LoRA adapters of peft that are merged for it.

peft itself is used only if the program has imported it already.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

from torchcram.compress import compress_
from torchcram.messages import list_names
from torchcram.sharding import fsdp_modules, reshard

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from torch import nn

    from torchcram.operators import Operator
    from torchcram.weights import Weights

ALL_USED = (
    "LoraCrAM lets A and B get gradients that DDP does not expect, so "
    "find_unused_parameters=True makes the compressed pass fail; set {} to False"
)


def has_adapters(model: nn.Module) -> bool:
    """Returns whether a layer of `model` is a LoRA layer."""
    module = sys.modules.get("peft.tuners.lora.layer")
    return module is not None and any(isinstance(m, module.LoraLayer) for m in model.modules())


def deployed_weights(model: nn.Module, weights: Weights) -> Weights:
    """Returns those of `weights` that remain once adapters are merged: all but A and B.

    Raises:
        ValueError: If none of them remains.
    """
    if not has_adapters(model):
        return weights
    from torchcram.integrations.peft.layers import merged_weights

    remaining = {id(weight) for weight in merged_weights(model).values()}
    chosen = {name: weight for name, weight in weights.items() if id(weight) in remaining}
    if not chosen:
        raise ValueError(f"no weight remains after a merge of adapters: {list_names(weights)}")
    return chosen


def merged_in_place(model: nn.Module, weights: Weights) -> AbstractContextManager[None]:
    """Replaces W by W + s B A for a `with` block, in which layers compute with that alone.

    The caller must restore W. Without adapters it does nothing.
    """
    if not has_adapters(model):
        return nullcontext()
    from torchcram.integrations.peft.merge import merged

    return merged(model, weights)


def refuse_unused_parameters(optimizer: object, model: object) -> None:
    """Checks that DDP does not search for unused parameters if `optimizer` is a LoraCrAM.

    Raises:
        ValueError: If it does.
    """
    model = getattr(model, "_orig_mod", model)  # compiled
    searches = isinstance(model, DistributedDataParallel) and model.find_unused_parameters
    if searches and is_lora_cram(optimizer):
        raise ValueError(ALL_USED.format("it"))


def is_lora_cram(optimizer: object) -> bool:
    """Returns whether `optimizer` is a LoraCrAM."""
    module = sys.modules.get("torchcram.integrations.peft.optimizer")
    return module is not None and isinstance(optimizer, module.LoraCrAM)


@contextmanager
def compressed_to(target: Operator, model: nn.Module, weights: Weights) -> Iterator[None]:
    """Compresses `model`, with its adapters merged, for a `with` block; then restores it."""
    weights = deployed_weights(model, weights)
    with _unchanged(model, weights), merged_in_place(model, weights):
        compress_(model, target, weights=weights)
        yield


@contextmanager
def _unchanged(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Restores `weights` and all buffers of `model` after a `with` block."""
    before = [(t, t.detach().clone()) for t in (*weights.values(), *model.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        # autocast and FSDP may hold copies of the compressed weights
        torch.clear_autocast_cache()
        reshard(fsdp_modules(model))
