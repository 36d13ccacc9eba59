"""A tensor to the parts that are stored of it."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcram.artifact.bits import pack
from torchcram.artifact.encoding import MASK
from torchcram.artifact.form import Form
from torchcram.artifact.integers import Quantized, as_integers
from torchcram.artifact.places import fill_up, write_indices, write_mask


def encode(tensor: Tensor, form: Form, quantized: Quantized | None = None) -> dict[str, Tensor]:
    """Returns the parts that `decode` makes the tensor from.

    Args:
        tensor: contiguous, on the CPU.
        form: its own; the encoding fits it.
        quantized: the integers, for an encoding with bits.
    """
    encoding = form.encoding
    flat = (form.to_rows(tensor) if encoding.by_rows else tensor).reshape(-1)
    stored: dict[str, Tensor] = {}
    kept = None
    if encoding.places is not None:
        kept = as_integers(flat) != 0  # -0.0 is no zero
        if encoding.places == MASK:
            stored["mask"] = write_mask(kept)
        else:
            kept = fill_up(kept, *encoding.pattern)
            stored["indices"] = write_indices(kept, encoding.pattern[1])
    if encoding.bits is None or quantized is None:
        values = tensor if kept is None else flat[kept]
        return {**stored, "values": values.to(encoding.values or tensor.dtype)}
    codes = quantized.codes
    if not encoding.by_rows:
        codes = form.from_rows(codes).view(-1)
    codes = codes if kept is None else codes[kept]
    codes = codes.view(torch.uint8).bitwise_and((1 << encoding.bits) - 1)
    return {**stored, "integers": pack(codes, encoding.bits), "scales": quantized.scales}
