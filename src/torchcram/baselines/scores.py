"""Scores of either sign: selection by them, and how far they are from a target."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.layers import layout_of, like, local_weights
from torchcram.operators import GlobalTopK, Sparsifier
from torchcram.sharding import local

if TYPE_CHECKING:
    from torchcram.weights import Masks, Weights


def as_magnitudes(weights: Weights, scores: Weights) -> Weights:
    """Returns positive numbers in the order of `scores`, for `Sparsifier.select`.

    The numbers are the ranks of the scores among all floating-point numbers, so that the order is
    exact and equal scores stay equal; of float64, scores that differ in the last bit may tie. NaN
    is the largest score.

    Args:
        weights: Weights that the scores belong to; their layouts and shards are copied.
        scores: Scores by name, of either sign; for shards, those of the local rows.
    """
    wide = any(score.dtype == torch.float64 for score in scores.values())
    ranks = _rank_of_float64 if wide else _rank_of_float32
    return like(weights, {name: ranks(score) for name, score in scores.items()})


def _rank_of_float32(scores: Tensor) -> Tensor:
    rank = _signed_rank(scores.detach().to(torch.float32), torch.int32)
    return rank.to(torch.float64) + 2.0**31  # float64 holds all 32 bits


def _rank_of_float64(scores: Tensor) -> Tensor:
    rank = _signed_rank(scores.detach().to(torch.float64), torch.int64)
    return ((rank >> 1) + (1 << 62)).view(torch.float64)  # magnitudes have one bit less


def _signed_rank(scores: Tensor, integer: torch.dtype) -> Tensor:
    """Returns integers that order as `scores` do; 0.0 and -0.0 are equal."""
    bits = scores.nan_to_num(torch.inf, torch.inf, -torch.inf).view(integer)
    return torch.where(bits < 0, -(bits & torch.iinfo(integer).max), bits)


def per_weight(weights: Weights) -> dict[str, Tensor]:
    """Returns zeros that have an entry for every local weight, by name; float32 at least."""
    return {
        name: torch.zeros_like(weight, dtype=_wide(weight), requires_grad=False)
        for name, weight in local_weights(weights).items()
    }


def scalar_for(weights: Weights) -> Tensor:
    """Returns a number as a tensor, where the first weight is and as precise as the widest."""
    first, *others = weights.values()
    dtype = _wide(first)
    for other in others:
        dtype = torch.promote_types(dtype, other.dtype)
    return torch.zeros((), dtype=dtype, device=first.device)


def per_layer(weights: Weights) -> dict[str, Tensor]:
    """Returns zeros that have an entry for every layer, by name, and broadcast to `in_layers`."""
    return {
        name: torch.zeros(
            (layout_of(weights, name).layers, *[1] * weight.dim()),
            dtype=_wide(weight),
            device=weight.device,
        )
        for name, weight in weights.items()
    }


def _wide(weight: Tensor) -> torch.dtype:
    """Returns a dtype that does not lose the small steps of what is trained beside a weight."""
    return torch.promote_types(weight.dtype, torch.float32)


def in_layers(weights: Weights, name: str, tensor: Tensor | None = None) -> Tensor:
    """Views a weight as (layers, rows of a layer, ...).

    Args:
        weights: All weights, not sharded.
        name: Name of the weight to view.
        tensor: Tensor of the same shape, such as a gradient, to view instead of the weight.
    """
    tensor = weights[name] if tensor is None else tensor
    view: Tensor = tensor.detach().unflatten(0, (layout_of(weights, name).layers, -1))
    return view


def each_in_layers(weights: Weights, tensors: Weights | None = None) -> list[Tensor]:
    """Views all weights, or tensors by the names of some, as `in_layers` does."""
    tensors = weights if tensors is None else tensors
    return [in_layers(weights, name, tensor) for name, tensor in tensors.items()]


def gradients_of(tensors: Weights) -> dict[str, Tensor]:
    """Returns the gradients of the tensors that have one, by name; of shards, the local rows."""
    return {name: local(t.grad) for name, t in tensors.items() if t.grad is not None}


def sigmoid_slopes(values: Sequence[Tensor]) -> list[Tensor]:
    """Returns the derivatives p (1 - p) of sigmoids by their values p."""
    slopes = list(torch._foreach_neg(list(values)))
    torch._foreach_add_(slopes, 1)
    torch._foreach_mul_(slopes, list(values))
    return slopes


def shortfall(
    operator: Sparsifier, weights: Weights, scores: Weights, masks: Masks
) -> dict[str, Tensor]:
    """Returns by how much all scores must rise together so that no kept score is negative.

    Scores that the operator ranks together rise by the same amount: those of all layers if it is
    global, otherwise those of each layer. If some must rise, the largest pruned score becomes zero.

    Args:
        operator: Target that the masks were selected for.
        weights: Weights that the scores belong to, not sharded.
        scores: Scores by name, of either sign.
        masks: Masks that `operator` has selected by the scores.

    Returns:
        Amounts by name, with an entry for every layer; see `per_layer`.
    """
    edges = {}
    for name, score in scores.items():
        view, kept = (in_layers(weights, name, tensor) for tensor in (score, masks[name]))
        layer = tuple(range(1, view.dim()))
        lowest_kept = view.masked_fill(~kept, torch.inf).amin(layer, keepdim=True)
        highest_pruned = view.masked_fill(kept, -torch.inf).amax(layer, keepdim=True)
        edges[name] = (lowest_kept, highest_pruned)
    if isinstance(operator, GlobalTopK):
        lowest = min(float(kept.min()) for kept, _ in edges.values())
        highest = max(float(pruned.max()) for _, pruned in edges.values())
        edges = {
            name: (torch.full_like(kept, lowest), torch.full_like(pruned, highest))
            for name, (kept, pruned) in edges.items()
        }
    amounts = {}
    for name, (kept, pruned) in edges.items():
        pruned = pruned.masked_fill(pruned == -torch.inf, torch.inf)  # none is pruned
        amounts[name] = -torch.minimum(kept, pruned).clamp(max=0)
    return amounts


def set_magnitudes_(weight: Tensor, magnitudes: Tensor) -> None:
    """Gives weights other magnitudes, and keeps their signs; none becomes zero."""
    tiny = torch.finfo(weight.dtype).tiny
    weight.copy_(magnitudes.clamp(min=tiny).to(weight.dtype).copysign(weight))
