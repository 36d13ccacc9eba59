"""LoRA layers, and the weight that each has once its adapter is merged.

W    frozen weight of a layer       B A  its adapter, of scale s
M    mask of a compression          G    gradient with respect to the merged weight
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from peft.tuners.lora.layer import LoraLayer, LoraVariant
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.conv import _ConvNd

from torchcram.layers import some_of
from torchcram.messages import list_names
from torchcram.weights import compressible_weights, is_conv1d, zero_unmasked_

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from torchcram.optim.step_state import UndoStack
    from torchcram.weights import LayerWeights, Weights


def merged_weights(model: nn.Module) -> LayerWeights:
    """Returns the weights that are compressible once the adapters are merged.

    Those are the weights of all layers that can be compressed, with and without an adapter, and the
    trained copies of `modules_to_save`; A and B themselves are not among them.
    """
    apart = {
        id(parameter)
        for module in model.modules()
        for name in ("original_module", *getattr(module, "adapter_layer_names", ()))
        if name != "modules_to_save" and isinstance(part := getattr(module, name, None), nn.Module)
        for parameter in part.parameters()
    }
    weights = compressible_weights(model)
    chosen = [name for name, weight in weights.items() if id(weight) not in apart]
    if not chosen:
        raise ValueError(f"{type(model).__name__} has no compressible weights beside its adapters")
    return some_of(weights, chosen)


def adapted_layers(model: nn.Module, weights: Weights) -> dict[str, LoraLayer]:
    """Returns the LoRA layers whose adapters are merged into `weights`, by the names of these.

    Raises:
        ValueError: If there is no such layer, or one is not plain LoRA on a frozen weight.
    """
    layers = lora_layers(model, weights)
    if not layers:
        raise ValueError(f"{type(model).__name__} has no LoRA adapter on a compressible weight")
    return layers


def lora_layers(model: nn.Module, weights: Weights) -> dict[str, LoraLayer]:
    """Returns the same as `adapted_layers`, but possibly no layer."""
    names = {id(weight): name for name, weight in weights.items()}
    layers = {}
    for where, layer in model.named_modules():
        if not isinstance(layer, LoraLayer):
            continue
        base = layer.get_base_layer()
        weight = getattr(base, "weight", None)
        if id(weight) not in names:
            if others := [name for name in weights if name.startswith(f"{where}.base_layer.")]:
                raise ValueError(
                    f"{where!r} adapts weights of a {type(base).__name__}; allowed is LoRA on "
                    f"layers with one weight: leave out {list_names(others)} by weights="
                )
            continue
        _check_plain(where, layer)
        layers[names[id(weight)]] = layer
    return layers


def _check_plain(where: str, layer: LoraLayer) -> None:
    """Raises ValueError unless a layer is plain LoRA on a frozen, whole weight."""
    base = layer.get_base_layer()
    reasons = {
        "its own weight is trained, too": base.weight.requires_grad,
        "it is sharded over processes": hasattr(base.weight, "to_local"),
        "its adapter is merged already": layer.merged,
        "its adapter has a bias (lora_bias)": any(layer.lora_bias.values()),
        "it is a convolution in groups, which peft does not merge": getattr(base, "groups", 1) > 1,
        "its adapter is a variant of LoRA such as DoRA": any(
            not isinstance(variant, HeldMask) for variant in layer.lora_variant.values()
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"{where!r}: {reason}; allowed is plain LoRA on a frozen, whole weight"
            )


@torch.no_grad()
def merge_(layers: Mapping[str, LoraLayer], weights: Weights) -> None:
    """Replaces W by W + s B A, in place; the same bits as a merge by peft."""
    for name, layer in layers.items():
        for adapter in _active(layer):
            weights[name].add_(_product(layer, adapter))


@contextmanager
def taken_for_merged(layer: LoraLayer) -> Iterator[None]:
    """Makes `layer` compute with its own weight alone for a `with` block."""
    layer.merged_adapters = _active(layer)  # tells peft that they are in the weight
    try:
        yield
    finally:
        layer.merged_adapters = []


def straight_through(layer: LoraLayer, mask: Tensor | None, undo: UndoStack) -> None:
    """Makes `layer` compute with its own weight alone, and propagates M * G to A and B.

    Args:
        layer: Layer whose weight is W + s B A, compressed.
        mask: Mask M of that weight; None for a dense gradient.
        undo: Stack that the call to undo it is pushed to.
    """
    weight = own_weight(layer)
    hooks: list[RemovableHandle] = []

    def leave() -> None:
        for hook in hooks:
            hook.remove()
        weight.requires_grad_(False)
        layer.merged_adapters = []

    undo.push(leave)
    weight.requires_grad_(True)
    hook = partial(_propagate, layer=layer, mask=mask)
    hooks.append(weight.register_post_accumulate_grad_hook(hook))
    layer.merged_adapters = _active(layer)  # tells peft that they are in the weight


def _propagate(weight: Tensor, *, layer: LoraLayer, mask: Tensor | None) -> None:
    """Adds s (M * G) A' and s B' (M * G) to the gradients of B and A; drops G."""
    gradient, weight.grad = weight.grad, None
    assert gradient is not None  # noqa: S101
    if mask is not None:
        zero_unmasked_([gradient], [mask])  # M * G
    for adapter in _active(layer):
        with torch.enable_grad():
            product = _product(layer, adapter)
        if product.requires_grad:
            torch.autograd.backward(product, gradient.to(product.dtype))


def _product(layer: LoraLayer, adapter: str) -> Tensor:
    """Returns s B A, or s (M * B A) while a mask is held."""
    with torch.autocast(own_weight(layer).device.type, enabled=False):  # peft merges outside
        product: Tensor = getattr(layer, "get_delta_weight")(adapter)  # noqa: B009
    held = layer.lora_variant.get(adapter)
    return held.masked(product) if isinstance(held, HeldMask) else product


def own_weight(layer: LoraLayer) -> Tensor:
    """Returns W, the frozen weight of a layer."""
    weight: Tensor = layer.get_base_layer().weight  # type: ignore[assignment,unused-ignore]
    return weight


def _active(layer: LoraLayer) -> list[str]:
    return [adapter for adapter in layer.active_adapters if adapter in layer.lora_A]


class HeldMask(LoraVariant):  # type: ignore[misc,unused-ignore]
    """LoRA variant with a masked product: W + s (M * B A), in training and in every merge."""

    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def masked(self, product: Tensor) -> Tensor:
        """Returns M * product."""
        return product.masked_fill(self.mask.logical_not(), 0)

    def forward(  # type: ignore[override,unused-ignore]
        self,
        module: LoraLayer,
        active_adapter: str,
        x: Tensor,
        result: Tensor,
        **_: Any,  # noqa: ANN401
    ) -> Tensor:
        """Adds s (M * B A) x to the output of the layer."""
        x = module.lora_dropout[active_adapter](x)
        product = _product(module, active_adapter)
        base = module.get_base_layer()
        if isinstance(base, _ConvNd):
            convolve: Callable[..., Tensor] = getattr(base, "_conv_forward")  # noqa: B009
            return result + convolve(x, product, None)
        if is_conv1d(base):
            return result + x @ product
        return result + linear(x, product)

    def merge_safe(  # type: ignore[override,unused-ignore]
        self, module: LoraLayer, active_adapter: str, orig_weight: Tensor
    ) -> Tensor:
        """Returns W + s (M * B A)."""
        return orig_weight + _product(module, active_adapter).to(orig_weight.dtype)

    def merge_unsafe(  # type: ignore[override,unused-ignore]
        self, module: LoraLayer, active_adapter: str, orig_weight: Tensor
    ) -> None:
        """Replaces W by W + s (M * B A)."""
        orig_weight.data.add_(_product(module, active_adapter))

    def unmerge(  # type: ignore[override,unused-ignore]
        self, module: LoraLayer, active_adapter: str, orig_weight: Tensor
    ) -> Tensor:
        """Returns W, up to rounding."""
        return orig_weight - _product(module, active_adapter).to(orig_weight.dtype)
