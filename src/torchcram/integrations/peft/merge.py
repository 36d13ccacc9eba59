"""Merging adapters into sparse weights, and masks that keep zeros while adapters train."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, cast

import torch
from peft.tuners.lora.layer import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer

from torchcram.compress import compress_
from torchcram.integrations.peft.layers import (
    HeldMask,
    adapted_layers,
    lora_layers,
    merge_,
    merged_weights,
    own_weight,
    taken_for_merged,
)
from torchcram.messages import list_names
from torchcram.trained import copy_marks
from torchcram.weights import apply_masks_, compressible_weights, weights_in

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.operators import Operator
    from torchcram.weights import Masks, Weights


def merge_sparse(
    model: nn.Module, to: Operator | str | Masks, *, weights: Weights | None = None
) -> nn.Module:
    """Returns a copy of the model with all adapters merged and the result compressed.

    The model itself keeps its adapters, so that it can be merged for several targets.

    Args:
        model: Model that peft made.
        to: Operator to compress with, or its text; or the masks of the weights, by their names
            before or after adapters were added.
        weights: Weights to compress, such as those of the `LoraCrAM` that trained the adapters; by
            default all compressible weights of the merged model. Only their names are used.

    Raises:
        ValueError: If the model has no adapters or they are merged already; if a mask or an entry
            of `weights` is not a weight of the model, or a mask has another shape or dtype.
    """
    twin = copy.deepcopy(model)
    copy_marks(model, twin)
    return merge_sparse_(twin, to, weights=weights)


def merge_sparse_(
    model: nn.Module, to: Operator | str | Masks, *, weights: Weights | None = None
) -> nn.Module:
    """Merges in place, without the memory of a copy; see `merge_sparse`.

    As with `merge_and_unload` of peft, `model` itself must not be used afterwards.

    Returns:
        Model without adapters.
    """
    _require_adapters(model)
    before = merged_weights(model)
    if isinstance(to, Mapping):
        _masks_for(before, to)
    names = None if weights is None else _names_in(before, weights)
    merged: nn.Module = model.merge_and_unload()  # type: ignore[operator]
    after = compressible_weights(merged)
    if isinstance(to, Mapping):
        apply_masks_(after, _masks_for(after, to))
        return merged
    if names is not None:
        after = weights_in(merged, {n: w for n, w in after.items() if _plain(n) in names})
    compress_(merged, to, weights=after)
    return merged


def _require_adapters(model: nn.Module) -> None:
    """Raises ValueError unless the model has adapters that are not merged."""
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no adapters; they may be merged already")
    if any(layer.merged for layer in layers):
        raise ValueError("adapters are merged already: unmerge_adapter() first")


def _names_in(known: Weights, weights: Weights) -> set[str]:
    """Returns the names of `weights` before adapters were added, which `known` must contain."""
    names = {_plain(name) for name in weights}
    if missing := names - {_plain(name) for name in known}:
        raise ValueError(f"the merged model has no compressible {list_names(sorted(missing))}")
    return names


@contextmanager
def merged(model: nn.Module, weights: Weights) -> Iterator[None]:
    """Replaces W by W + s B A for a `with` block; layers use that alone, the caller restores W."""
    layers = lora_layers(model, weights)
    with torch.no_grad():
        merge_(layers, weights)
    with ExitStack() as after:
        for layer in layers.values():
            after.enter_context(taken_for_merged(layer))
        yield


@contextmanager
def merged_model(model: nn.Module) -> Iterator[nn.Module]:
    """Merges all adapters for a `with` block, in which the model has plain layers.

    Its parameters then have their names before adapters were added. After the block the adapters
    are back, and so is W, bit for bit.

    Args:
        model: Model whose adapters are all plain LoRA, also without the wrapper of peft.

    Raises:
        ValueError: If the model has no adapters or they are merged already.
    """
    _require_adapters(model)
    modules = model.named_modules(remove_duplicate=False)
    by_path = {path: layer for path, layer in modules if isinstance(layer, LoraLayer)}
    layers = {str(id(layer)): layer for layer in by_path.values()}
    weights = {key: own_weight(layer) for key, layer in layers.items()}
    before = {key: weight.detach().clone() for key, weight in weights.items()}
    try:
        merge_(layers, weights)
        for path, layer in by_path.items():
            _put(model, path, layer.get_base_layer())
        yield model
    finally:
        for path, layer in by_path.items():
            _put(model, path, cast("nn.Module", layer))
        with torch.no_grad():
            for key, weight in weights.items():
                weight.copy_(before[key])
        torch.clear_autocast_cache()


def _put(model: nn.Module, path: str, layer: nn.Module) -> None:
    """Puts a layer into the position of another one, in the same order."""
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = layer


class HeldLoraMasks:
    """Masks that LoRA layers hold until `remove()`, or until the end of a `with` block."""

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
        """Stops holding the masks."""
        for layer, adapter in self._held:
            layer.lora_variant.pop(adapter, None)

    def __enter__(self) -> HeldLoraMasks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def hold_lora_masks(model: nn.Module, masks: Masks) -> HeldLoraMasks:
    """Keeps pruned weights at zero while adapters train: layers compute with W + s (M * B A).

    W is zeroed where its mask is False. A merge while the masks are held, also by peft itself, has
    the same zeros. Works with any optimizer, `LoraCrAM` included. A step materialises B A, which is
    as large as W.

    Args:
        model: Model that peft made.
        masks: Masks of its frozen weights, by their names before or after adapters were added.

    Returns:
        Handle that stops holding the masks.

    Raises:
        ValueError: If a mask has no weight, another shape or another dtype, or its weight is
            trained without an adapter (use `hold_masks`); nothing is changed then.
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
    by_name = {}
    for key, mask in masks.items():
        name = names.get(_plain(key))
        if name is None:
            raise ValueError(f"there is a mask for {key!r}, but only weights {list_names(names)}")
        if mask.shape != weights[name].shape or mask.dtype != torch.bool:
            raise ValueError(
                f"the mask of {key!r} is {mask.dtype} of shape {tuple(mask.shape)}; "
                f"needed is torch.bool of shape {tuple(weights[name].shape)}"
            )
        by_name[name] = mask
    return by_name


def _plain(name: str) -> str:
    """Returns the name of a weight before peft wrapped its layer."""
    parts = name.removeprefix("base_model.model.").split(".")
    if "modules_to_save" in parts:
        at = parts.index("modules_to_save")
        del parts[at : at + 2]  # it and the name of the adapter
    return ".".join(part for part in parts if part != "base_layer")
