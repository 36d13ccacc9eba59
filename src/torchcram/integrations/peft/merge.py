"""Merging adapters so that zeros stay zeros."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from torchcram.compress import compress_
from torchcram.integrations.peft.layers import (
    HeldMask,
    adapted_layers,
    lora_layers,
    merge_,
    merged_weights,
    taken_for_merged,
)
from torchcram.messages import list_names
from torchcram.weights import apply_masks_, compressible_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.operators import Operator
    from torchcram.weights import Masks, Weights


def merge_sparse(model: nn.Module, to: Operator | str | Masks) -> nn.Module:
    """Merges all adapters, compresses what comes out, and returns the model without adapters.

    As with `merge_and_unload` of peft, `model` itself is of no use afterwards; merge a deep copy to
    go on with it.

    Args:
        model: the one that peft made.
        to: an operator, to compress to; or the masks of weights that are to be zero, by their names
            before or after adapters were added.

    Raises:
        ValueError: if a mask has no weight, another shape or another dtype; nothing is merged then.
    """
    if isinstance(to, Mapping):
        _masks_for(merged_weights(model), to)
    merged: nn.Module = model.merge_and_unload()  # type: ignore[operator]
    weights = compressible_weights(merged)
    if isinstance(to, Mapping):
        apply_masks_(weights, _masks_for(weights, to))
    else:
        compress_(merged, to, weights=weights)
    return merged


@contextmanager
def merged(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Makes W + s B A of W and lets layers compute with that alone; who calls it puts W back."""
    layers = lora_layers(model, weights)
    with torch.no_grad():
        merge_(layers, weights)
    with ExitStack() as after:
        for layer in layers.values():
            after.enter_context(taken_for_merged(layer))
        yield


class HeldLoraMasks:
    """Masks held in LoRA layers until `remove()`, or until the end of a `with` block."""

    def __init__(self, model: nn.Module, weights: Weights, masks: Masks) -> None:
        self._held = []
        apply_masks_(weights, masks)
        for name, layer in adapted_layers(model, weights).items():
            if name not in masks:
                continue
            for adapter in layer.lora_A:
                layer.lora_variant[adapter] = HeldMask(masks[name])
                self._held.append((layer, adapter))

    def remove(self) -> None:
        """Lets go of the masks."""
        for layer, adapter in self._held:
            layer.lora_variant.pop(adapter, None)

    def __enter__(self) -> HeldLoraMasks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def hold_lora_masks(model: nn.Module, masks: Masks) -> HeldLoraMasks:
    """Keeps pruned weights at zero while adapters train: layers compute with W + s (M * B A).

    W is zeroed where its mask is False. A merge while the masks are held, by peft itself too, has
    the same zeros. Works with any optimizer, `LoraCrAM` included. A step materialises B A, which is
    as large as W.

    Args:
        model: the one that peft made.
        masks: of its frozen weights, by their names before or after adapters were added.

    Raises:
        ValueError: if a mask has no weight, another shape or another dtype, or its weight is
            trained by itself (`hold_masks` is for that); nothing is changed then.
    """
    weights = merged_weights(model)
    known = _masks_for(weights, masks)
    for name in known:
        if weights[name].requires_grad:
            raise ValueError(f"{name!r} is trained without an adapter: hold its mask by hold_masks")
    adapted_layers(model, weights)
    return HeldLoraMasks(model, weights, known)


def _masks_for(weights: Weights, masks: Masks) -> dict[str, Tensor]:
    """Returns `masks` by the names in `weights`."""
    names = {_plain(name): name for name in weights}
    found = {}
    for given, mask in masks.items():
        name = names.get(_plain(given))
        if name is None:
            raise ValueError(f"there is a mask for {given!r}, but only weights {list_names(names)}")
        if mask.shape != weights[name].shape or mask.dtype != torch.bool:
            raise ValueError(
                f"the mask of {given!r} is {mask.dtype} of shape {tuple(mask.shape)}; "
                f"needed is torch.bool of shape {tuple(weights[name].shape)}"
            )
        found[name] = mask
    return found


def _plain(name: str) -> str:
    """Returns the name of a weight before peft wrapped its layer."""
    parts = name.removeprefix("base_model.model.").split(".")
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        del parts[at : at + 2]  # and the name of the adapter
    return ".".join(part for part in parts if part != "base_layer")
