"""The tables of embeddings: never pruned, but they may be rounded on their way into a file."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from torchcram.operators import Quantize, as_operator


def find_tables(
    model: nn.Module | Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns the tables of embeddings out of `tensors`; a state dict does not tell which they are.

    Args:
        model: or its state dict.
        tensors: its state dict, tied tensors once.
    """
    if not isinstance(model, nn.Module):
        return {}
    tables = {
        module.weight.data_ptr()  # whatever it is called: a table may be that of another layer, too
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
    }
    return {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.data_ptr() in tables and tensor.dim() == 2
    }


@torch.no_grad()
def round_tables(tables: Mapping[str, Tensor], to: Quantize | str) -> dict[str, Tensor]:
    """Returns rounded copies of tables.

    Args:
        tables: of embeddings.
        to: a quantizer, as "int8"; every row has a scale of its own, or several with groups.

    Raises:
        ValueError: if it is another operator, or there are no tables.
    """
    operator = as_operator(to)
    if not isinstance(operator, Quantize):
        raise ValueError(f"embeddings {str(to)!r}: allowed are int2 to int8, as int8 or int4:g64")
    if not tables:
        raise ValueError(
            f"embeddings {str(to)!r}: there are none in the model, and of a state dict nobody can "
            "tell which tensors are embeddings"
        )
    copies = {name: table.detach().clone() for name, table in tables.items()}
    operator.compress_(copies)
    return copies
