"""Sparse fine-tuning: training that keeps pruned weights at zero."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchcram.messages import list_names
from torchcram.sharding import local
from torchcram.weights import LayerWeights, apply_masks_, zero_unmasked_

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

    from torchcram.weights import Masks, Weights


class HeldMasks:
    """Masks that an optimizer holds until `remove()`, or until the end of a `with` block."""

    def __init__(self, optimizer: Optimizer, weights: Weights, masks: Masks) -> None:
        self._weights = LayerWeights({name: weights[name] for name in masks})
        self._masks = masks
        apply_masks_(self._weights, masks)
        for name, mask in masks.items():
            moments = [
                local(value)
                for value in optimizer.state.get(weights[name], {}).values()
                if isinstance(value, torch.Tensor) and value.shape == weights[name].shape
            ]
            zero_unmasked_(moments, [mask] * len(moments))
        self._handles: list[RemovableHandle] = [
            weight.register_post_accumulate_grad_hook(self._masking(name))
            for name, weight in self._weights.items()
            if weight.requires_grad
        ]
        self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def remove(self) -> None:
        """Stops holding the masks."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> HeldMasks:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _masking(self, name: str) -> Callable[[Tensor], None]:
        mask = self._masks[name]

        def mask_gradient(weight: Tensor) -> None:
            if (gradient := weight.grad) is not None:
                zero_unmasked_([local(gradient)], [mask])

        return mask_gradient

    def _after_step(self, *_: object) -> None:
        apply_masks_(self._weights, self._masks)


def hold_masks(optimizer: Optimizer, weights: Weights, masks: Masks) -> HeldMasks:
    """Zeroes `weights` where `masks` are False and keeps them so in every step of `optimizer`.

    Gradients are masked as backward computes them and weights after every step, so that momentum
    and the moments of Adam, too, are zero where a weight is pruned. Works with any optimizer, with
    and without a closure, `CrAM` included.

    Args:
        optimizer: Optimizer that trains the weights.
        weights: Compressed weights by name.
        masks: Masks by the same names; the mask of a sharded weight covers the local rows. Weights
            without a mask train as usual.

    Returns:
        Handle that stops holding the masks.

    Raises:
        ValueError: If a mask has no weight, another shape or another dtype, or the optimizer trains
            none of the weights; nothing is changed then.
    """
    if masks is None:
        raise ValueError("there are no masks to hold: the operator has none (masks is None)")
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, mask in masks.items():
        if name not in weights:
            raise ValueError(
                f"there is a mask for {name!r}, but only weights {list_names(weights)}"
            )
        shape = local(weights[name]).shape
        if mask.shape != shape or mask.dtype != torch.bool:
            raise ValueError(
                f"the mask of {name!r} is {mask.dtype} of shape {tuple(mask.shape)}; "
                f"needed is torch.bool of shape {tuple(shape)}"
            )
    if not any(id(weights[name]) in trained for name in masks):
        raise ValueError(f"this {type(optimizer).__name__} trains none of the weights with a mask")
    return HeldMasks(optimizer, weights, masks)
