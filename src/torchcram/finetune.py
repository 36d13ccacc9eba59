"""Sparse fine-tuning: train on, and keep what is zero at zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torchcram.weights import apply_masks_, zero_unmasked_

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from torch import Tensor

    from torchcram.weights import Masks, Weights


class HeldMasks:
    """Masks held by an optimizer until `remove()`, or until the end of a `with` block."""

    def __init__(self, optimizer: Optimizer, weights: Weights, masks: Masks) -> None:
        self._weights = {name: weights[name] for name in masks}
        self._masks = masks
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        apply_masks_(self._weights, masks)

    def remove(self) -> None:
        """Lets go of the masks."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> HeldMasks:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def _before_step(
        self, _: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Masks the gradients: those there are, and those that a closure is still to compute."""
        self._mask_gradients()
        if kwargs.get("closure") is not None:
            kwargs = {**kwargs, "closure": self._masking(kwargs["closure"])}
        # args may or may not begin with the optimizer itself
        return tuple(self._masking(arg) if _is_closure(arg) else arg for arg in args), kwargs

    def _after_step(self, *_: object) -> None:
        apply_masks_(self._weights, self._masks)

    def _masking(self, closure: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def masked() -> Tensor:
            loss = closure()
            self._mask_gradients()
            return loss

        return masked

    def _mask_gradients(self) -> None:
        found = {name: w.grad for name, w in self._weights.items() if w.grad is not None}
        zero_unmasked_(list(found.values()), [self._masks[name] for name in found])


def _is_closure(argument: object) -> bool:
    return callable(argument) and not isinstance(argument, Optimizer)


def hold_masks(optimizer: Optimizer, weights: Weights, masks: Masks) -> HeldMasks:
    """Zeroes `weights` where `masks` are False and keeps them so in every step of `optimizer`.

    Gradients are masked before a step and weights after it, so that momentum and the moments of
    Adam stay zero where a weight is pruned. Works with any optimizer, with and without a closure,
    `CrAM` included.

    Args:
        optimizer: the one that trains the weights.
        weights: the compressed weights, by name.
        masks: by the same names; weights without a mask train as usual.

    Raises:
        ValueError: if a mask has no weight, another shape or another dtype, or the optimizer trains
            none of them; nothing is changed then.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, mask in masks.items():
        if name not in weights:
            raise ValueError(f"there is a mask for {name!r}, but only weights {', '.join(weights)}")
        if mask.shape != weights[name].shape or mask.dtype != torch.bool:
            raise ValueError(
                f"the mask of {name!r} is {mask.dtype} of shape {tuple(mask.shape)}; "
                f"needed is torch.bool of shape {tuple(weights[name].shape)}"
            )
    if not any(id(weights[name]) in trained for name in masks):
        raise ValueError(f"this {type(optimizer).__name__} trains none of the weights with a mask")
    return HeldMasks(optimizer, weights, masks)
