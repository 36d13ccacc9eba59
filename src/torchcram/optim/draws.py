"""Which operator a step uses, and when its mask is computed anew."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from torchcram.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from torchcram.weights import Masks, Weights


class Draws:
    """Draws operators from a generator of its own, so alike on every process.

    Every operator counts its own uses; at every `mask_interval`-th of them its mask is computed
    anew, between them the last one is used again.
    """

    def __init__(self, operators: Sequence[Operator], mask_interval: int, seed: int) -> None:
        self.operators = tuple(operators)
        self.mask_interval = mask_interval
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: Operator | None = None  # the one of this step, at one level
        self._uses: Counter[Operator] = Counter()
        self._masks: dict[tuple[Operator, int], Masks] = {}  # by operator and pass of the rule

    def happens(self, probability: float) -> bool:
        """Returns True with the given probability."""
        return probability > 0 and float(torch.rand((), generator=self._generator)) < probability

    def operator(self) -> Operator:
        """Draws an operator uniformly, out of a range its level too, and counts the use."""
        index = int(torch.randint(len(self.operators), (), generator=self._generator))
        self._uses[self.operators[index]] += 1
        self._drawn = self.operators[index].draw(self._generator)
        return self.operators[index]

    @torch.no_grad()
    def compress_(self, operator: Operator, weights: Weights, *, at: int) -> Masks | None:
        """Replaces `weights` by C(weights) in pass `at`; returns the mask, new or kept."""
        kept = self._masks.get((operator, at))
        if kept is not None and (self._uses[operator] - 1) % self.mask_interval:
            operator.recompress_(weights, kept)
            return kept
        masks = (self._drawn or operator).compress_(weights)
        if self.mask_interval > 1 and masks is not None:
            self._masks[operator, at] = masks
        return masks

    def forget(self, operator: Operator | None) -> None:
        """Drops the masks of an operator: its next use computes new ones."""
        self._masks = {key: masks for key, masks in self._masks.items() if key[0] != operator}

    def state_dict(self) -> dict[str, Any]:
        """Returns all that later draws and masks depend on."""
        return {
            "generator": self._generator.get_state(),
            "uses": {str(operator): uses for operator, uses in self._uses.items()},
            "masks": [
                (str(operator), at, {name: pack_bits(mask) for name, mask in masks.items()})
                for (operator, at), masks in self._masks.items()
            ],
        }

    def load_state_dict(self, state: dict[str, Any], weights: Weights) -> None:
        """Continues from `state`; what it says of operators that are not drawn here is left out."""
        known = {str(operator): operator for operator in self.operators}
        for operator, _, masks in state["masks"]:
            for name, bits in masks.items():
                if name not in weights or bits.numel() != -(-weights[name].numel() // 8):
                    raise ValueError(
                        f"the state has a mask of {operator} for {name!r}, unlike here"
                    )
        self._generator.set_state(state["generator"].cpu())
        self._uses = Counter({known[o]: uses for o, uses in state["uses"].items() if o in known})
        self._masks = {
            (known[o], at): {name: unpack_bits(bits, weights[name]) for name, bits in masks.items()}
            for o, at, masks in state["masks"]
            if o in known
        }


def pack_bits(mask: Tensor) -> Tensor:
    """Returns eight entries of a mask per byte."""
    flat = mask.detach().reshape(-1).to("cpu", torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, like: Tensor) -> Tensor:
    """Returns the mask that `pack_bits` packed, with the shape and device of `like`."""
    bits = (packed.cpu().unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    mask = torch.empty_like(like, dtype=torch.bool)
    return mask.copy_(bits.reshape(-1)[: like.numel()].view(like.shape).bool())
