"""How much of a model can be compressed, and a word about what cannot."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from weakref import WeakSet

from torch import nn

from torchcram.layouts import own_parameters
from torchcram.messages import list_names, warn_caller

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.layers import Weights

MOST_UNCOVERED = 0.1
"""Share of the parameters above which those that cannot be compressed are named."""

_DENSE_MODULES = re.compile(r"(?:Embeddings?|Norm(?:\dd)?)$")  # by the names of their classes
_DENSE_PARAMETERS = re.compile(
    r"(?:embed|(?:[._]|^)(?:pos|position|tokens?|bias|table)(?:_|$))[^.]*$"
)
_warned: WeakSet[nn.Module] = WeakSet()


class CoverageWarning(UserWarning):
    """A large part of a model is in no layer that can be compressed."""


def warn_uncovered(model: nn.Module, covered: Weights) -> None:
    """Names the parameters of `model` that stay dense, where they are many; once per model.

    Embeddings, tokens, position tables, norms and biases are meant to stay dense and do not count.

    Args:
        model: Any module.
        covered: Parameters that can be compressed, by name.
    """
    if model in _warned:
        return
    left = uncovered(model, covered)
    count = sum(parameter.numel() for parameter in left.values())
    share = count / max(count + sum(parameter.numel() for parameter in covered.values()), 1)
    if share > MOST_UNCOVERED:
        _warned.add(model)
        warn_caller(
            f"{share:.0%} of the parameters of this {type(model).__name__}, embeddings, norms and "
            f"biases aside, are in no layer that is compressed: {list_names(left)}. To compress "
            "some of them, give weights={**compressible_weights(model), name: parameter}; to leave "
            "them dense without this warning, choose by only= or skip=",
            CoverageWarning,
        )


def treat_alike(model: nn.Module, copy: nn.Module) -> None:
    """Says nothing of a copy where the model was warned about."""
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
