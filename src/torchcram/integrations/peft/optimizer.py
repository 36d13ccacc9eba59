"""CrAM whose compressed point is C(W + s B A).

In a compressed pass a layer computes with the compressed merged weight alone. The gradient G with
respect to it goes straight through C: masked by M, it reaches B and A by the chain rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torchcram.integrations.adapters import refuse_unused_parameters
from torchcram.integrations.peft.layers import (
    adapted_layers,
    merge_,
    merged_weights,
    straight_through,
)
from torchcram.operators import Operator, as_operator
from torchcram.optim import CRAM_PLUS, CrAM, UpdateRule

if TYPE_CHECKING:
    import torch
    from peft.tuners.lora.layer import LoraLayer
    from torch import nn
    from torch.amp import GradScaler
    from torch.optim import Optimizer

    from torchcram.weights import Masks, Weights


class LoraCrAM(CrAM):
    """CrAM over adapters A and B, with w~ = C(W + s B A) for the weights they are merged into.

    The ascent moves A and B, and whatever else is trained. Dropout of the adapters is for the dense
    pass only: a merged weight has none.

    Args:
        model: the one that peft made; adapters are to stay enabled while it trains.
        base: the optimizer of the adapters.
        operators: as for `CrAM`, and so are all options.
        rho: see `CrAM`.
        rule: see `CrAM`.
        sparse_gradients: see `CrAM`.
        normalize: see `CrAM`.
        max_ascent_norm: see `CrAM`.
        mask_interval: see `CrAM`.
        base_step_probability: see `CrAM`.
        weights: what to compress; by default all `merged_weights(model)`.
        seed: see `CrAM`.
        replay_randomness: see `CrAM`.
        check_finite: see `CrAM`.

    Raises:
        ValueError: if a layer has more than plain LoRA (DoRA, a bias of the adapter), is merged
            already, has its own weight trained, or is sharded over processes (FSDP); if `model`
            is in a DDP with find_unused_parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operators: Operator | str | Sequence[Operator | str] | None,
        *,
        rho: float = 0.05,
        rule: UpdateRule = CRAM_PLUS,
        sparse_gradients: bool = True,
        normalize: bool | None = None,
        max_ascent_norm: float | None = None,
        mask_interval: int = 1,
        base_step_probability: float = 0.0,
        weights: Weights | None = None,
        seed: int = 0,
        replay_randomness: bool = False,
        check_finite: bool = True,
    ) -> None:
        refuse_unused_parameters(self, model)
        weights = merged_weights(model) if weights is None else weights
        self._adapted = _Adapted(adapted_layers(model, weights))
        given = (operators,) if isinstance(operators, (Operator, str)) else operators or ()
        super().__init__(
            model,
            base,
            [_OfMerged(as_operator(operator), self._adapted) for operator in given],
            rho=rho,
            rule=rule,
            sparse_gradients=sparse_gradients,
            normalize=normalize,
            max_ascent_norm=max_ascent_norm,
            mask_interval=mask_interval,
            base_step_probability=base_step_probability,
            weights=weights,
            seed=seed,
            replay_randomness=replay_randomness,
            check_finite=check_finite,
        )

    @contextmanager
    def compressed(self, *, grad_scaler: GradScaler | None = None) -> Iterator[bool]:
        """Moves the merged weights to w~ for a `with` block; see `CrAM.compressed`."""
        try:
            with super().compressed(grad_scaler=grad_scaler) as needed, ExitStack() as after:
                masks = self._adapted.masks
                if masks is not None:
                    sparse = self.sparse_gradients and any(one.mask for one in self.rule.passes)
                    for name, layer in self._adapted.layers.items():
                        mask = masks.get(name) if sparse else None
                        after.enter_context(straight_through(layer, mask))
                yield needed
        finally:
            self._adapted.masks = None

    @property
    def operators(self) -> tuple[Operator, ...]:
        """What steps draw from."""
        return tuple(_given(operator) for operator in super().operators)

    @property
    def operator(self) -> Operator | None:
        """The operator drawn last; None after a plain step and for SAM."""
        drawn = super().operator
        return None if drawn is None else _given(drawn)


class _Adapted:
    """The LoRA layers of some weights, and the masks of the pass at hand.

    Masks are None unless the merged weights are compressed, and empty if that has no masks.
    """

    def __init__(self, layers: dict[str, LoraLayer]) -> None:
        self.layers = layers
        self.masks: Masks | None = None


@dataclass(frozen=True, eq=False)
class _OfMerged(Operator):
    """C(W + s B A), under the name of C, and equal to it: masks are found by either."""

    operator: Operator
    adapted: _Adapted = field(repr=False)

    def compress_(self, weights: Weights) -> Masks | None:
        """Replaces W by C(W + s B A)."""
        merge_(self.adapted.layers, weights)
        masks = self.operator.compress_(weights)
        self.adapted.masks = masks or {}
        return masks

    def recompress_(self, weights: Weights, masks: Masks) -> None:
        """Replaces W by C(W + s B A) with `masks` of an earlier use."""
        merge_(self.adapted.layers, weights)
        self.operator.recompress_(weights, masks)
        self.adapted.masks = masks

    @property
    def is_range(self) -> bool:
        """Whether C stands for a range of operators."""
        return self.operator.is_range

    def draw(self, generator: torch.Generator) -> Operator:
        """Draws C out of a range."""
        return replace(self, operator=self.operator.draw(generator))

    def __eq__(self, other: object) -> bool:
        return self.operator == (other.operator if isinstance(other, _OfMerged) else other)

    def __hash__(self) -> int:
        return hash(self.operator)

    def __str__(self) -> str:
        return str(self.operator)


def _given(operator: Operator) -> Operator:
    return operator.operator if isinstance(operator, _OfMerged) else operator
