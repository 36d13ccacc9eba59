"""What is compressible, and what a mask does to it."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchcram.coverage import CoverageWarning, warn_uncovered
from torchcram.layers import (
    LayerWeights,
    Masks,
    Weights,
    like,
    local_weights,
    reduction_last,
    some_of,
)
from torchcram.layouts import KINDS, find_layer_weights
from torchcram.messages import list_names
from torchcram.sharding import fsdp_modules, local, part_of, reshard

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "CoverageWarning",
    "LayerWeights",
    "Masks",
    "Weights",
    "apply_masks_",
    "compressible_weights",
    "cuda_kernels",
    "layer_weights",
    "mask_gradients_",
    "masks_of",
    "reduction_last",
    "sparsity",
    "weights_in",
    "zero_unmasked_",
]


def weights_in(model: nn.Module, weights: Weights | None) -> LayerWeights:
    """Returns `weights` with the layers behind them; None stands for all compressible ones.

    Raises:
        ValueError: if one of them is not the parameter of `model` with that name.
    """
    if weights is None:
        return compressible_weights(model)
    known = layer_weights(model)
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        if parameters.get(name) is not weight:
            raise ValueError(f"weights[{name!r}] is not a parameter of this {type(model).__name__}")
    return like(known, weights)


def compressible_weights(
    model: nn.Module,
    *,
    only: str | None = None,
    skip: str | None = None,
    dense_ends: bool = False,
) -> LayerWeights:
    """Returns the weights of all layers of `model` that multiply by a matrix, by parameter name.

    Those are the weights of convolution and Linear layers and of Transformers' Conv1D, the input
    projections of nn.MultiheadAttention, the input and recurrent weights of nn.LSTM, GRU, RNN and
    their cells, and the fused weights of experts (three dimensions, in a module called `experts`).
    Embeddings, norms, biases and other bare parameters are never compressible; neither is a Linear
    weight that is tied to an embedding. Parameters that could be weights of layers not known here
    are named in a `CoverageWarning`, once for each model, where they are more than a tenth of all.

    A model that FSDP shards drops what it has gathered first, so call this between passes.

    Args:
        model: Any module.
        only: Regular expression; names in which it is not found are left out.
        skip: Regular expression; names in which it is found are left out.
        dense_ends: Whether to leave out the first and the last compressible layer of the model.

    Raises:
        ValueError: if a pattern matches no name, or nothing is left.
    """
    weights = layer_weights(model)
    if not weights:
        raise ValueError(f"{type(model).__name__} has no compressible weights: no {KINDS}")
    names = list(weights)
    chosen = names[1:-1] if dense_ends else names
    for option, pattern in (("only", only), ("skip", skip)):
        if pattern is None:
            continue
        matching = {name for name in names if _pattern(option, pattern).search(name)}
        if not matching:
            raise ValueError(
                f"{option}={pattern!r} matches no compressible weight out of: {list_names(names)}"
            )
        chosen = [name for name in chosen if (name in matching) == (option == "only")]
    if not chosen:
        raise ValueError(
            f"only={only!r}, skip={skip!r}, dense_ends={dense_ends} leave nothing out of: "
            + list_names(names)
        )
    if only is None and skip is None:
        warn_uncovered(model, weights)
    return some_of(weights, chosen)


def layer_weights(model: nn.Module) -> LayerWeights:
    """Returns all compressible weights of `model`, without a warning; there may be none."""
    reshard(fsdp_modules(model))  # gathered copies are no parameters
    weights = find_layer_weights(model)
    for name, weight in weights.items():
        if isinstance(weight, nn.parameter.UninitializedParameter):
            raise ValueError(f"{name!r} has no shape yet: run one batch through the model first")
    return weights


def _pattern(option: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{option}={pattern!r} is not a regular expression: {error}") from error


def sparsity(weights: Weights) -> float:
    """Returns the fraction of zeros in `weights`; all processes call it where they are sharded."""
    total = sum(weight.numel() for weight in weights.values())
    if total == 0:
        raise ValueError("the sparsity of no weights at all is not defined")
    return 1 - sum(_count_nonzero(name, weight) for name, weight in weights.items()) / total


def _count_nonzero(name: str, weight: Tensor) -> int:
    found = torch.count_nonzero(local(weight))
    part = part_of(name, weight)
    if part is not None:
        part.peers.add_up_(found)
    return int(found)


def masks_of(weights: Weights) -> dict[str, Tensor]:
    """Recovers the masks of compressed `weights` from their zeros; of a shard, its own mask."""
    return {name: local(weight).detach() != 0 for name, weight in weights.items()}


@torch.no_grad()
def apply_masks_(weights: Weights, masks: Masks) -> None:
    """Zeroes `weights` where their masks are False, in place; no sign or NaN survives there."""
    weights = local_weights(weights)
    zero_unmasked_([weights[name] for name in masks], list(masks.values()))


def mask_gradients_(weights: Weights, masks: Masks) -> None:
    """Zeroes the gradients of `weights`, where there are any, where `masks` are False."""
    found = {name: grad for name in masks if (grad := weights[name].grad) is not None}
    if getattr(weights, "sharded", False):
        found = {name: local(grad) for name, grad in found.items()}
    zero_unmasked_(list(found.values()), [masks[name] for name in found])


def zero_unmasked_(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zeroes each tensor where its mask is False; on CUDA in one launch for all of them."""
    kernels = cuda_kernels()
    together: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
    for tensor, mask in zip(tensors, masks, strict=True):
        if kernels is not None and tensor.is_cuda and kernels.walk_alike(tensor, mask):
            together.setdefault((tensor.device, tensor.dtype), []).append((tensor, mask))
        else:
            tensor.masked_fill_(mask.logical_not(), 0)
    for group in together.values():
        assert kernels is not None  # noqa: S101
        kernels.zero_unmasked_([t for t, _ in group], [m for _, m in group])


@functools.cache
def cuda_kernels() -> ModuleType | None:
    """Returns the CUDA kernels, imported when first asked for, or None where there are none."""
    if not torch.cuda.is_available():
        return None
    try:
        from torchcram.kernels import cuda
    except ImportError:  # a build of torch without Triton: everything works, slower
        return None
    return cuda
