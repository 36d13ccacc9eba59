"""Linear layers for compressed weights: on torch's kernels for 2:4 and 4 bits, on ours for 8."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchcram.runtime.gpu.rules import DTYPES, int4_group, int4_tiles
from torchcram.weights import cuda_kernels

if TYPE_CHECKING:
    from torchcram.runtime.onnx.integers import Integers


def sparse_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns a Linear layer whose weight is a semi-structured tensor.

    Args:
        weight: (outputs, inputs), 2:4, on a GPU; see `why_not_sparse`.
        bias: or None.
    """
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of SparseSemiStructuredTensor")
        sparse = torch.sparse.to_sparse_semi_structured(weight.detach().contiguous())
    layer.weight = nn.Parameter(sparse, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return layer


class Int8Linear(nn.Module):
    """y = (x q^T) s + b, with q in 8 bits and one scale per output.

    For few rows a kernel of our own reads q as it is. For many, or where there is no Triton, the
    weight is expanded at every call: that saves memory between calls, and no time.

    Args:
        integers: q and s; see `why_not_int8`.
        bias: or None.
    """

    values: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, integers: Integers, bias: Tensor | None) -> None:
        super().__init__()
        self.register_buffer("values", integers.values.clone().contiguous())
        self.register_buffer("scale", integers.scale.float().flatten())
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        kernels = cuda_kernels() if x.is_cuda and x.dtype in DTYPES else None
        count = x.numel() // max(1, x.shape[-1])
        if kernels is None or count > kernels.MOST_ROWS:
            weight = (self.values * self.scale.unsqueeze(1)).to(x.dtype)
            return nn.functional.linear(x, weight, self.bias)
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y: Tensor = kernels.multiply_int8(rows, self.values, self.scale, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class Int4Linear(nn.Module):
    """y = x (q s)^T + b, with q packed in 4 bits and one scale per group of inputs, in bfloat16.

    Args:
        integers: q and s, on a GPU; see `why_not_int4`.
        bias: or None.
    """

    packed: Tensor
    scale_and_zero: Tensor
    bias: Tensor | None

    def __init__(self, integers: Integers, bias: Tensor | None) -> None:
        super().__init__()
        inputs = integers.values.shape[1]
        group = int4_group(integers.block or inputs)
        if group is None:
            raise ValueError(f"no group of inputs fits {integers.block or inputs}")
        self.group = group
        codes = four_bit_codes(integers.values)
        packed = torch._convert_weight_to_int4pack(codes, int4_tiles(inputs))
        self.register_buffer("packed", packed)
        self.register_buffer("scale_and_zero", scales_and_zeros(integers, group))
        self.register_buffer("bias", None if bias is None else bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch._weight_int4pack_mm(rows, self.packed, self.group, self.scale_and_zero)
        return _finish(y, self.bias, x)


def four_bit_codes(values: Tensor) -> Tensor:
    """Returns q + 8, two in a byte, the earlier one in the upper half: (outputs, inputs / 2)."""
    codes = (values + 8).to(torch.uint8)
    return (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()


def scales_and_zeros(integers: Integers, group: int) -> Tensor:
    """Returns (inputs / group, outputs, 2) in bfloat16: s, and the value of the code 8, zero.

    Args:
        integers: q and s.
        group: inputs per scale, a divisor of those that share one.
    """
    outputs, inputs = integers.values.shape
    scale = integers.scale.view(outputs, -1)
    scale = scale.repeat_interleave(inputs // group // scale.shape[1], 1).t()
    return torch.stack([scale, torch.zeros_like(scale)], 2).to(torch.bfloat16).contiguous()


def _finish(y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], y.shape[-1])
