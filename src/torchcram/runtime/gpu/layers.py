"""Layers for compressed weights on a GPU, and the requirements of their kernels.

2:4 and 4 bits run on kernels of torch, 8 bits on a Triton kernel of torchcram.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from torchcram.weights import cuda_kernels

if TYPE_CHECKING:
    from torchcram.runtime.integers import Integers

DTYPES = (torch.bfloat16, torch.float16)
ROWS, COLUMNS = 32, 64  # multiples of 2:4 weights in CUTLASS; cuSPARSELt needs 16 and 16
GROUPS = (256, 128, 64, 32)  # inputs per scale in torch._weight_int4pack_mm
INNER = {8: 128, 4: 64, 2: 32}  # inner tiles of int4 weights: multiple of inputs that they need


def is_two_of_four(weight: Tensor) -> bool:
    """Returns whether every four neighbouring inputs have at most two nonzero weights."""
    if weight.dim() != 2 or weight.shape[1] % 4:
        return False
    kept = (weight != 0).view(-1, 4).sum(1)
    return bool((kept <= 2).all())


def why_not_sparse(weight: Tensor, dtype: torch.dtype) -> str | None:
    """Returns why a Linear weight cannot be a semi-structured tensor, or None if it can.

    Args:
        weight: Weight (outputs, inputs).
        dtype: Dtype that the layer computes in.
    """
    if not is_two_of_four(weight):
        return "not 2:4"
    if dtype not in DTYPES:
        return f"2:4 is for bfloat16 and float16, not {_plain(dtype)}"
    outputs, inputs = weight.shape
    return _multiples("2:4", outputs, ROWS, inputs, COLUMNS)


def why_not_int8(integers: Integers, dtype: torch.dtype) -> str | None:
    """Returns why a Linear layer cannot be an `Int8Linear`, or None if it can.

    Args:
        integers: Integers and scales of its weight.
        dtype: Dtype that the layer computes in.
    """
    if dtype not in DTYPES:
        return f"int8 is for bfloat16 and float16, not {_plain(dtype)}"
    if integers.block:
        return "int8 needs one scale per output, not per group"
    return None


def why_not_int4(integers: Integers, dtype: torch.dtype) -> str | None:
    """Returns why a Linear layer cannot be an `Int4Linear`, or None if it can.

    Args:
        integers: Integers and scales of its weight.
        dtype: Dtype that the layer computes in.
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
    """Returns the number of inner tiles for a number of inputs that is a multiple of 32."""
    return next(tiles for tiles, multiple in INNER.items() if inputs % multiple == 0)


def _multiples(kernel: str, outputs: int, rows: int, inputs: int, columns: int) -> str | None:
    for what, count, multiple in (("outputs", outputs, rows), ("inputs", inputs, columns)):
        if count % multiple:
            return f"{kernel} needs a multiple of {multiple} {what}, not {count}"
    return None


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sparse_linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Returns a Linear layer whose weight is a semi-structured tensor.

    Args:
        weight: Weight (outputs, inputs) on a GPU that fits `why_not_sparse`.
        bias: Bias of the outputs, or None.
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


class PointwiseConv2d(nn.Module):
    """A convolution with kernels of 1x1, computed by a Linear layer with a row per pixel.

    Inputs in channels_last are such rows already; others are copied, and so are outputs, unless the
    layer computes them in the format of the input.

    Args:
        linear: Layer that maps (..., input channels) to (..., output channels).
        stride: Distance of the pixels that are read, vertical and horizontal.
    """

    def __init__(self, linear: nn.Module, stride: tuple[int, ...] = (1, 1)) -> None:
        super().__init__()
        self.linear = linear
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        """Maps (n, inputs, height, width) to (n, outputs, height, width), or without n."""
        down, right = self.stride
        pixels = x[..., ::down, ::right].movedim(-3, -1).contiguous()
        y: Tensor = self.linear(pixels)
        if x.stride(-3) == 1:  # channels_last
            return y.contiguous().movedim(-1, -3)
        return y.movedim(-1, -3).contiguous()


def why_not_pointwise(layer: nn.Conv2d) -> str | None:
    """Returns why a convolution cannot be a `PointwiseConv2d`, or None if it can."""
    if layer.kernel_size != (1, 1):
        return "there is a kernel for convolutions of 1x1, not {}x{}".format(*layer.kernel_size)
    if layer.groups != 1:
        return f"there is a kernel for one group of channels, not {layer.groups}"
    if layer.padding not in ((0, 0), "valid", "same"):
        return "there is a kernel for convolutions without padding only"
    return None


def sparse_conv(layer: nn.Conv2d) -> PointwiseConv2d:
    """Returns a 1x1 convolution whose weight is a semi-structured tensor.

    Args:
        layer: Convolution on a GPU that fits `why_not_pointwise`, with a weight that fits
            `why_not_sparse`.
    """
    return PointwiseConv2d(sparse_linear(layer.weight.flatten(1), layer.bias), layer.stride)


class Int8Linear(nn.Module):
    """y = (x q^T) s + b, with q in 8 bits and one scale per output.

    For few rows a Triton kernel reads q directly. For many rows, or without Triton, the weight is
    dequantized at every call, which saves memory but no time.

    Args:
        integers: Integers q and scales s that fit `why_not_int8`.
        bias: Bias of the outputs, or None.
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
        multiply = int8_linear_op if torch.compiler.is_compiling() else int8_linear
        y: Tensor = multiply(x, self.values, self.scale, self.bias)
        return y


def int8_linear(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Returns (x values^T) scale + bias, as `Int8Linear` does."""
    kernels = cuda_kernels() if x.is_cuda and x.dtype in DTYPES else None
    count = x.numel() // max(1, x.shape[-1])
    if kernels is None or count > kernels.MOST_ROWS:
        weight = (values * scale.unsqueeze(1)).to(x.dtype)
        return nn.functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y: Tensor = kernels.multiply_int8(rows, values, scale, bias)
    return y.view(*x.shape[:-1], y.shape[-1])


# torch.compile takes the operator as it is; eager calls go past it, as dispatching takes time
int8_linear_op = torch.library.custom_op(
    "torchcram::int8_linear",
    int8_linear,
    mutates_args=(),
    schema="(Tensor x, Tensor values, Tensor scale, Tensor? bias) -> Tensor",
)


@int8_linear_op.register_fake
def _(x: Tensor, values: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:  # noqa: ARG001
    return x.new_empty(*x.shape[:-1], len(values))


class Int4Linear(nn.Module):
    """y = x (q s)^T + b, with q packed in 4 bits and one scale per group of inputs, in bfloat16.

    Args:
        integers: Integers q and scales s on a GPU that fit `why_not_int4`.
        bias: Bias of the outputs, or None.
    """

    packed: Tensor
    scale_and_zero: Tensor
    bias: Tensor | None

    def __init__(self, integers: Integers, bias: Tensor | None) -> None:
        super().__init__()
        inputs = integers.values.shape[1]
        per_scale = integers.block or inputs
        group = int4_group(per_scale)
        if group is None:
            raise ValueError(
                f"inputs per scale must be a multiple of {GROUPS[-1]}, got {per_scale}"
            )
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
    """Returns q + 8, two codes in a byte, the first in the upper half: (outputs, inputs / 2)."""
    codes = (values + 8).to(torch.uint8)
    return (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous()


def scales_and_zeros(integers: Integers, group: int) -> Tensor:
    """Returns (inputs / group, outputs, 2) in bfloat16: the scale, and zero as the value of code 8.

    Args:
        integers: Integers q and scales s.
        group: Number of inputs per scale; a divisor of the number that share one.
    """
    outputs, inputs = integers.values.shape
    scale = integers.scale.view(outputs, -1)
    scale = scale.repeat_interleave(inputs // group // scale.shape[1], 1).t()
    return torch.stack([scale, torch.zeros_like(scale)], 2).to(torch.bfloat16).contiguous()


def _finish(y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    if bias is not None:
        y = y + bias
    return y.view(*x.shape[:-1], y.shape[-1])
