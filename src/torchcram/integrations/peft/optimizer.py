"""CrAM for LoRA adapters, with the compressed point C(W + s B A).

In a compressed pass a layer computes with the compressed merged weight alone. The gradient G with
respect to that weight passes straight through C: masked by M, it reaches B and A by the chain rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchcram.integrations.adapters import refuse_unused_parameters
from torchcram.integrations.peft.layers import (
    adapted_layers,
    merge_,
    merged_weights,
    straight_through,
)
from torchcram.integrations.peft.merge import merge_sparse
from torchcram.optim import CrAM

if TYPE_CHECKING:
    from torch import nn

    from torchcram.operators import Operator
    from torchcram.optim.rules import Pass
    from torchcram.weights import LayerWeights, Masks, Weights


class LoraCrAM(CrAM):
    """CrAM over adapters A and B, with w~ = C(W + s B A) for the weights they are merged into.

    The ascent moves A and B, and whatever else is trained. Dropout of the adapters applies to the
    dense pass only: a merged weight has none. The arguments are those of `CrAM`: `model` is the
    model that peft made, whose adapters stay enabled while it trains, `base` is the optimizer of
    the adapters, and `weights` are by default all `merged_weights(model)`.

    Raises:
        ValueError: If a layer has more than plain LoRA (DoRA, a bias of the adapter), is merged
            already, has its own weight trained, or is sharded over ranks (FSDP); or if `model` is
            wrapped by DDP with find_unused_parameters=True.
    """

    def compress(self, operator: Operator | str, model: nn.Module | None = None) -> nn.Module:
        """Returns a copy of the model with its adapters merged and the trained weights compressed.

        The same as `merge_sparse(model, operator, weights=optimizer.weights)`.

        Args:
            operator: Operator, or its text, such as "global:0.9".
            model: None; the average of adapters is not that of the weights they are merged into.

        Raises:
            ValueError: If there is a `model`.
        """
        if model is not None:
            raise ValueError("LoraCrAM compresses the model that it trains, not another one")
        self.restore()
        return merge_sparse(self.model, operator, weights=self.weights)

    def _select_weights(self, weights: Weights | None) -> LayerWeights:
        refuse_unused_parameters(self, self.model)
        chosen = merged_weights(self.model) if weights is None else weights
        self._layers = adapted_layers(self.model, chosen)
        return super()._select_weights(chosen)

    def _compress_(self) -> Masks | None:
        merge_(self._layers, self.weights)
        return super()._compress_()

    def _prepare_layers(self, pass_: Pass, masks: Masks | None) -> None:
        super()._prepare_layers(pass_, masks)
        if not pass_.compress:
            return
        sparse = masks if masks is not None and pass_.mask and self.sparse_gradients else {}
        for name, layer in self._layers.items():
            straight_through(layer, sparse.get(name), self._undo)
