"""Which parameters are the weights of layers, and how each layer uses its own.

Layers of Transformers are recognised without importing it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torchcram.layers import PLAIN, LayerWeights, Layout

if TYPE_CHECKING:
    from torch import Tensor

KINDS = "convolution, Linear, Conv1D, attention, recurrent or expert layer"
_PROJECTIONS = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_EXPERTS = re.compile(r"(?:^|\.)experts(?:\.[a-zA-Z_]\w*)*$")  # experts.0 has layers of its own


def find_layer_weights(model: nn.Module) -> LayerWeights:
    """Returns the weights of all layers but embeddings, by parameter name; a tied one once."""
    named: dict[int, tuple[str, Tensor]] = {}
    layouts: dict[int, Layout] = {}
    embeddings: set[int] = set()
    for path, module in model.named_modules():  # once: peft makes parameters anew every time
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
    """Yields the parameters of a module itself, by their names in the model that it is part of."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield f"{path}.{name}" if path else name, parameter


def is_conv1d(module: nn.Module) -> bool:
    """Returns whether a module is a Conv1D of Transformers: Linear with an (inputs, outputs)."""
    library = sys.modules.get("transformers.pytorch_utils")
    return library is not None and isinstance(module, library.Conv1D)


def _own_layouts(path: str, module: nn.Module) -> Iterator[tuple[str, Layout]]:
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

    Transformers says so by an attribute, but not everywhere. Otherwise the shapes tell: an expert
    goes from the hidden size to twice the inner size, and from the inner size back.
    """
    declared = getattr(experts, "is_transposed", None)
    if isinstance(declared, bool):
        return declared
    up, down = (experts._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    return up is not None and down is not None and up.shape[1] == down.shape[2]
