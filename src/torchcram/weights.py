"""Which parameters of a model can be compressed, and what a mask does to them.

Layers of Transformers are recognised without importing it.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torchcram.layers import (
    PLAIN,
    LayerWeights,
    Layout,
    Masks,
    Weights,
    like,
    local_weights,
    reduction_last,
    some_of,
)
from torchcram.messages import list_names, warn_caller
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

KINDS = "convolution, Linear, Conv1D, attention, recurrent or expert layer"
"""Layers with compressible weights, for error messages."""

MOST_UNCOVERED = 0.1
"""Share of parameters that cannot be compressed above which a warning names them."""

_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
PREPARED = "_torchcram_prepared"  # attribute of models whose layers a runtime has replaced
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.[a-zA-Z_]\w*)*$")  # experts.0 has layers of its own
_DENSE_MODULES = re.compile(r"(?:Embeddings?|Norm(?:\dd)?)$")  # by the names of their classes
_DENSE_PARAMETERS = re.compile(
    r"(?:embed|(?:[._]|^)(?:pos|position|tokens?|bias|table)(?:_|$))[^.]*$"
)
_warned: WeakSet[nn.Module] = WeakSet()


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
    weight that is tied to an embedding. A `CoverageWarning`, once per model, names the parameters
    that could be weights of unknown layers if they are more than a tenth of all.

    A model that is sharded by FSDP drops its gathered parameters first, so call this between
    passes.

    Args:
        model: Any module.
        only: Regular expression; weights whose name it does not match anywhere are left out.
        skip: Regular expression; weights whose name it matches anywhere are left out.
        dense_ends: Whether to leave out the first and the last compressible layer of the model.

    Raises:
        ValueError: If `only` matches no compressible weight, `skip` no parameter, or if no weight
            is left.
    """
    weights = layer_weights(model)
    if not weights:
        raise ValueError(f"{type(model).__name__} has no compressible weights: no {KINDS}")
    names = list(weights)
    chosen = names[1:-1] if dense_ends else names
    for option, pattern in (("only", only), ("skip", skip)):
        if pattern is None:
            continue
        expression = _pattern(option, pattern)
        matching = {name for name in names if expression.search(name)}
        everything = (name for name, _ in model.named_parameters(remove_duplicate=False))
        dense_already = option == "skip" and any(map(expression.search, everything))
        if not matching and not dense_already:
            raise ValueError(
                f"{option}={pattern!r} matches no compressible weight out of: {list_names(names)}"
            )
        chosen = [name for name in chosen if (name in matching) == (option == "only")]
    if not chosen:
        raise ValueError(
            f"only={only!r}, skip={skip!r}, dense_ends={dense_ends} leave no weight of: "
            + list_names(names)
        )
    if only is None and skip is None:
        warn_uncovered(model, weights)
    return some_of(weights, chosen)


def weights_in(model: nn.Module, weights: Weights | None) -> LayerWeights:
    """Returns `weights` with their layouts; None stands for all compressible weights.

    Raises:
        ValueError: If there are no weights, or one is not the parameter of `model` with its name.
    """
    if weights is None:
        return compressible_weights(model)
    if not weights:
        raise ValueError("weights is empty: there is nothing to compress")
    known = layer_weights(model)
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        if parameters.get(name) is not weight:
            raise ValueError(f"weights[{name!r}] is not a parameter of this {type(model).__name__}")
    return like(known, weights)


def layer_weights(model: nn.Module) -> LayerWeights:
    """Returns all compressible weights of `model`, without a warning; there may be none.

    Raises:
        ValueError: If a weight has no shape yet, or if layers of the model were replaced by those
            of a runtime, whose weights are packed.
    """
    if getattr(model, PREPARED, False):
        raise ValueError(
            f"this {type(model).__name__} was prepared to run fast, and its weights are packed: "
            "use the model that it was prepared from"
        )
    reshard(fsdp_modules(model))  # gathered copies are not parameters
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


def find_layer_weights(model: nn.Module) -> LayerWeights:
    """Returns the weights of all layers except embeddings, by name; a tied weight once."""
    named: dict[int, tuple[str, Tensor]] = {}
    layouts: dict[int, Layout] = {}
    embeddings: set[int] = set()
    # in one pass: peft creates new parameters at every access
    for path, module in model.named_modules():
        for name, parameter in own_parameters(path, module):
            named.setdefault(id(parameter), (name, parameter))
            if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
                embeddings.add(id(parameter))
        for name, layout in _own_layouts(path, module):
            layouts.setdefault(id(module._parameters.get(name)), layout)
    chosen = [key for key in named if key in layouts and key not in embeddings]
    return LayerWeights(
        dict(named[key] for key in chosen),
        {named[key][0]: layouts[key] for key in chosen if layouts[key] != PLAIN},
    )


def own_parameters(path: str, module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters of a module itself, by their names in the model it is part of."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{path}.{name}" if path else name, parameter


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is a Conv1D of Transformers: Linear with (inputs, outputs)."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def _own_layouts(path: str, module: nn.Module) -> Iterator[tuple[str, Layout]]:
    """Yields the compressible weights of a module itself, by their names in the module."""
    if isinstance(module, _ConvTransposeNd):
        yield "weight", Layout(transposed=True, groups=module.groups)
    elif isinstance(module, (_ConvNd, nn.Linear)):
        yield "weight", PLAIN
    elif is_conv1d(module):
        yield "weight", Layout(transposed=True)
    elif isinstance(module, nn.MultiheadAttention):
        yield "in_proj_weight", Layout(layers=3)
        yield from ((name, PLAIN) for name in _PROJECTIONS)
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        yield from ((name, PLAIN) for name in module._parameters if name.startswith("weight_"))
    elif _EXPERTS.search(path) or "Experts" in type(module).__name__:
        yield from _expert_layouts(module)


def _expert_layouts(experts: nn.Module) -> Iterator[tuple[str, Layout]]:
    for name, weight in experts._parameters.items():
        if weight is not None and _is_expert_weight(name, weight):
            transposed = _inputs_first(experts)
            yield name, Layout(transposed=transposed, layers=len(weight), stacked=True)


def _is_expert_weight(name: str, weight: Tensor) -> bool:
    if isinstance(weight, nn.parameter.UninitializedParameter):
        return False
    matrices = weight.dim() == 3 and weight.is_floating_point() and weight.element_size() > 1
    return matrices and "bias" not in name and "scale" not in name


def _inputs_first(experts: nn.Module) -> bool:
    """Returns whether experts are stored as (inputs, outputs), for `x @ w`, as in Llama 4.

    Some models of Transformers have an attribute for it. Otherwise the shapes show it: an expert
    maps the hidden size to twice the inner size, and the inner size back to the hidden size.
    """
    declared = getattr(experts, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    up, down = (experts._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    return up is not None and down is not None and up.shape[1] == down.shape[2]


class CoverageWarning(UserWarning):
    """A large part of a model is in no layer that can be compressed."""


def warn_uncovered(model: nn.Module, covered: Weights) -> None:
    """Warns, once per model, if many parameters of `model` cannot be compressed, naming them.

    Embeddings, tokens, position tables, norms and biases are meant to stay dense and do not count.

    Args:
        model: Model that the parameters belong to.
        covered: Parameters that can be compressed, by name.
    """
    if model in _warned:
        return
    others = uncovered(model, covered)
    count = sum(parameter.numel() for parameter in others.values())
    share = count / max(count + sum(parameter.numel() for parameter in covered.values()), 1)
    if share > MOST_UNCOVERED:
        _warned.add(model)
        warn_caller(
            f"{share:.0%} of the parameters of this {type(model).__name__}, embeddings, norms and "
            f"biases aside, are in no layer that is compressed: {list_names(others)}. To compress "
            "some of them, give weights={**compressible_weights(model), name: parameter}; to leave "
            "them dense without this warning, choose by only= or skip=",
            CoverageWarning,
        )


def copy_coverage_warning(model: nn.Module, copy: nn.Module) -> None:
    """Suppresses the `CoverageWarning` of a copy if the model itself has had it."""
    if model in _warned:
        _warned.add(copy)


def uncovered(model: nn.Module, covered: Weights) -> dict[str, Tensor]:
    """Returns the parameters that could be weights but are not in `covered`, by name."""
    named: dict[int, tuple[str, Tensor]] = {}
    dense: set[int] = set()
    for path, module in model.named_modules():
        is_table = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
        stays_dense = is_table or _DENSE_MODULES.search(type(module).__name__)
        for name, parameter in own_parameters(path, module):
            named.setdefault(id(parameter), (name, parameter))
            if stays_dense:
                dense.add(id(parameter))
    return {
        name: parameter
        for key, (name, parameter) in named.items()
        if key not in dense and name not in covered and _may_be_weight(name, parameter)
    }


def _may_be_weight(name: str, parameter: Tensor) -> bool:
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        return False
    matrix = sum(size > 1 for size in parameter.shape) > 1
    return matrix and not _DENSE_PARAMETERS.search(name)


def sparsity(weights: Weights) -> float:
    """Returns the fraction of zeros in `weights`; if they are sharded, all ranks must call it."""
    total = sum(weight.numel() for weight in weights.values())
    if total == 0:
        raise ValueError("the sparsity of no weights at all is not defined")
    return 1 - sum(_count_nonzero(name, weight) for name, weight in weights.items()) / total


def _count_nonzero(name: str, weight: Tensor) -> int:
    count = torch.count_nonzero(local(weight))
    part = part_of(name, weight)
    if part is not None:
        part.peers.add_up_(count)
    return int(count)


def masks_of(weights: Weights) -> dict[str, Tensor]:
    """Recovers the masks of compressed `weights` from their zeros; for shards, the local rows."""
    return {name: local(weight).detach() != 0 for name, weight in weights.items()}


@torch.no_grad()
def apply_masks_(weights: Weights, masks: Masks) -> None:
    """Zeroes `weights` in place where their masks are False; no -0.0 or NaN remains there."""
    weights = local_weights(weights)
    zero_unmasked_([weights[name] for name in masks], list(masks.values()))


def mask_gradients_(weights: Weights, masks: Masks) -> None:
    """Zeroes the gradients of `weights` where `masks` are False; weights may have no gradient."""
    gradients = {name: grad for name in masks if (grad := weights[name].grad) is not None}
    if getattr(weights, "sharded", False):
        gradients = {name: local(grad) for name, grad in gradients.items()}
    zero_unmasked_(list(gradients.values()), [masks[name] for name in gradients])


def zero_unmasked_(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zeroes each tensor where its mask is False; on CUDA one kernel launch serves all."""
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
    """Returns the module of CUDA kernels, imported when needed; None without CUDA or Triton."""
    if not torch.cuda.is_available():
        return None
    try:
        from torchcram.kernels import cuda
    except ImportError:  # a build of torch without Triton: everything works, slower
        return None
    return cuda
