"""One-shot compression of a model."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from torchcram.operators import Operator, parse_operator
from torchcram.weights import LayerWeights, compressible_weights

if TYPE_CHECKING:
    from torch import nn

    from torchcram.weights import Masks, Weights


def compress_(
    model: nn.Module, operator: Operator | str, *, weights: Weights | None = None
) -> Masks | None:
    """Compresses `model` in place and returns the masks, or None where the operator has none.

    Args:
        model: any module.
        operator: an operator, or its text, such as "global:0.9".
        weights: what to compress; by default all `compressible_weights(model)`.
    """
    operator = parse_operator(operator) if isinstance(operator, str) else operator
    return operator.compress_(compressible_weights(model) if weights is None else weights)


def compress(
    model: nn.Module, operator: Operator | str, *, weights: Weights | None = None
) -> nn.Module:
    """Returns a compressed copy of `model`, which itself stays as it is; see `compress_`."""
    operator = parse_operator(operator) if isinstance(operator, str) else operator
    weights = compressible_weights(model) if weights is None else weights
    original = dict(model.named_parameters())
    for name, weight in weights.items():
        if original.get(name) is not weight:
            raise ValueError(f"{name!r} is not a parameter of this {type(model).__name__}")
    twin = copy.deepcopy(model)
    parameters = dict(twin.named_parameters())
    theirs = LayerWeights(
        {name: parameters[name] for name in weights}, getattr(weights, "transposed", ())
    )
    compress_(twin, operator, weights=theirs)
    return twin
