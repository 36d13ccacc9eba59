"""Which kernels for compressed weights a Linear layer can use on a GPU, and why not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.runtime.onnx.integers import Integers

DTYPES = (torch.bfloat16, torch.float16)
ROWS, COLUMNS = 32, 64  # of 2:4 weights: CUTLASS's multiples; cuSPARSELt's are 16 and 16
GROUPS = (256, 128, 64, 32)  # inputs that share a scale in torch._weight_int4pack_mm
INNER = {8: 128, 4: 64, 2: 32}  # its inner tiles, and the multiple of inputs that they need


def is_two_of_four(weight: Tensor) -> bool:
    """Whether no four neighbours along the inputs hold more than two weights."""
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    kept = (weight != 0).view(-1, 4).sum(1)
    return bool((kept <= 2).all())


def why_not_sparse(weight: Tensor, dtype: torch.dtype) -> str | None:
    """Returns why a Linear weight cannot be a semi-structured tensor; None where it can.

    Args:
        weight: (outputs, inputs).
        dtype: that the layer computes in.
    """
    if not is_two_of_four(weight):
        return "not 2:4"
    if dtype not in DTYPES:
        return f"2:4 is for bfloat16 and float16, not {_plain(dtype)}"
    outputs, inputs = weight.shape
    return _multiples("2:4", outputs, ROWS, inputs, COLUMNS)


def why_not_int8(integers: Integers, dtype: torch.dtype) -> str | None:
    """Returns why a Linear layer cannot run on 8 bits; None where it can.

    Args:
        integers: of its weight.
        dtype: that the layer computes in.
    """
    if dtype not in DTYPES:
        return f"int8 is for bfloat16 and float16, not {_plain(dtype)}"
    if integers.block:
        return "int8 needs one scale per output, not per group"
    return None


def why_not_int4(integers: Integers, dtype: torch.dtype) -> str | None:
    """Returns why a Linear layer cannot use torch._weight_int4pack_mm; None where it can.

    Args:
        integers: of its weight.
        dtype: that the layer computes in.
    """
    if int(integers.values.abs().max()) > 7:
        return "more than 4 bits"
    if dtype != torch.bfloat16:
        return f"int4 is for bfloat16, not {_plain(dtype)}"
    outputs, inputs = integers.values.shape
    if integers.block and int4_group(integers.block) is None:
        return f"int4 needs groups of a multiple of {GROUPS[-1]} inputs, not {integers.block}"
    return _multiples("int4", outputs, 8, inputs, GROUPS[-1])


def int4_group(size: int) -> int | None:
    """Returns the largest group of torch._weight_int4pack_mm that divides `size` inputs."""
    return next((group for group in GROUPS if size % group == 0), None)


def int4_tiles(inputs: int) -> int:
    """Returns how many inner tiles to pack `inputs` in; a multiple of 32."""
    return next(tiles for tiles, multiple in INNER.items() if inputs % multiple == 0)


def _multiples(kernel: str, outputs: int, rows: int, inputs: int, columns: int) -> str | None:
    for what, count, multiple in (("outputs", outputs, rows), ("inputs", inputs, columns)):
        if count % multiple:
            return f"{kernel} needs a multiple of {multiple} {what}, not {count}"
    return None


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
