"""LoRA adapters of peft in a model of any framework; peft is imported only where it is already."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from torch.nn.parallel import DistributedDataParallel

from torchcram.messages import list_names

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

    from torchcram.weights import Weights

ALL_USED = (
    "LoraCrAM lets A and B get gradients that DDP does not see coming, so "
    "find_unused_parameters=True makes the compressed pass fail; set {} to False"
)


def has_adapters(model: nn.Module) -> bool:
    """Returns whether a layer of `model` is a LoRA layer."""
    module = sys.modules.get("peft.tuners.lora.layer")
    return module is not None and any(isinstance(m, module.LoraLayer) for m in model.modules())


def deployed_weights(model: nn.Module, weights: Weights) -> Weights:
    """Returns those of `weights` that are left once adapters are merged: all but A and B.

    Raises:
        ValueError: if none is.
    """
    if not has_adapters(model):
        return weights
    from torchcram.integrations.peft.layers import merged_weights

    left = {id(weight) for weight in merged_weights(model).values()}
    chosen = {name: weight for name, weight in weights.items() if id(weight) in left}
    if not chosen:
        raise ValueError(f"no weight is left after a merge of adapters: {list_names(weights)}")
    return chosen


def merged_in_place(model: nn.Module, weights: Weights) -> AbstractContextManager[None]:
    """Makes W + s B A of W and lets layers compute with that alone for a `with` block.

    Who calls it puts W back. Without adapters it does nothing.
    """
    if not has_adapters(model):
        return nullcontext()
    from torchcram.integrations.peft.merge import merged

    return merged(model, weights)


def refuse_unused_parameters(optimizer: object, model: object) -> None:
    """Checks that DDP looks for no unused parameters if `optimizer` is a LoraCrAM.

    Raises:
        ValueError: if it does.
    """
    model = getattr(model, "_orig_mod", model)  # compiled
    searches = isinstance(model, DistributedDataParallel) and model.find_unused_parameters
    if searches and is_lora_cram(optimizer):
        raise ValueError(ALL_USED.format("it"))


def is_lora_cram(optimizer: object) -> bool:
    """Returns whether `optimizer` is a LoraCrAM."""
    module = sys.modules.get("torchcram.integrations.peft.optimizer")
    return module is not None and isinstance(optimizer, module.LoraCrAM)
