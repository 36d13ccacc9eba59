"""Sparse convolutions as an operator of torch, `torch.ops.torchcram.sparse_conv2d`.

The kernels read and write [image][channel][row][column], or, `by_images`,
[row][column][channel][image]: images innermost. Outputs lie in memory as the inputs do, whichever
of these it is, and in the channels_last format where those of a dense convolution would.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.ops import (
    as_large_as,
    operators,
    pointer,
    register,
    require_floats,
    require_rows,
)
from torchcram.runtime.cpu.packing import Geometry, check_packed, described, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

# Dimensions of (image, channel, row, column), from the outermost to the innermost in memory.
_CONTIGUOUS, _CHANNELS_LAST, _INNERMOST = (0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 1, 0)
_BACK = (3, 2, 0, 1)  # undoes _INNERMOST

operators.define(
    "sparse_conv2d(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, SymInt features, "
    "int[] geometry, bool by_images, bool relu, bool channels_last=False) -> Tensor"
)


def _sparse_conv2d(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    relu: bool,
    channels_last: bool = False,
) -> Tensor:
    rows = rows_of(packed)
    require_rows("bias", bias, rows)
    shape = _geometry(geometry)
    size = _output_size(x, shape, features)
    batch, channels, height, width = x.shape
    native = _INNERMOST if by_images else _CONTIGUOUS
    y = _empty(x, size, native)
    residual = _laid_out(residual, y, by_images)
    if by_images:
        planes, padded = x.permute(_INNERMOST).contiguous(), (height, width)
    else:
        planes, padded = _padded(x, shape)
    good = rows == features and kernels().torchcram_convolution(
        planes.data_ptr(),
        described(shape, batch, channels, (height, width), padded),
        features,
        packed.data_ptr(),
        packed.numel(),
        by_images,
        pointer(bias),
        pointer(residual),
        int(relu),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    if not good:
        check_packed(packed)  # changed, and torch was not told
        raise ValueError(f"the packed matrix is no {shape} from {channels} channels to {features}")
    layout = _output_layout(x, by_images=by_images, channels_last=channels_last)
    return y if layout == native else _empty(x, size, layout).copy_(y)


def _sparse_conv2d_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    _relu: bool,
    channels_last: bool = False,
) -> Tensor:
    layout = _output_layout(x, by_images=by_images, channels_last=channels_last)
    return _empty(x, _output_size(x, _geometry(geometry), features), layout)


def _dense_conv2d(
    x: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    relu: bool,
    channels_last: bool = False,
) -> Tensor:
    shape = _geometry(geometry)
    _output_size(x, shape, features)  # refuses what is no image
    weight = unpack_conv2d(packed, x.shape[1], features, geometry, by_images=by_images)
    if channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    y = functional.conv2d(x, weight, bias, shape.stride, shape.padding, shape.dilation)
    y = y if residual is None else y + as_large_as(y, residual)
    return functional.relu(y) if relu else y


def unpack_conv2d(
    packed: Tensor, channels: int, features: int, geometry: Sequence[int], *, by_images: bool
) -> Tensor:
    """Returns the dense weight (features, channels, rows, columns) of a packed convolution.

    Args:
        packed: Packed matrix of the convolution.
        channels: Number of input channels.
        features: Number of output channels.
        geometry: Kernel, stride, padding and dilation, (rows, columns) of each.
        by_images: Whether it was packed for panels of images.

    Raises:
        ValueError: if the packed matrix is one of another shape.
    """
    shape = _geometry(geometry)
    (rows, columns), (down, right) = shape.kernel, shape.dilation
    count = channels * rows * columns
    # One image per weight of a kernel, as large as the kernel reaches, with a one at that weight.
    images = torch.zeros(
        (count, channels, down * (rows - 1) + 1, right * (columns - 1) + 1), device=packed.device
    )
    ones = torch.eye(count, device=packed.device).view(count, channels, rows, columns)
    images[:, :, ::down, ::right] = ones
    unpadded = [*geometry[:4], 0, 0, *geometry[6:]]
    columns_of_weight: Tensor = torch.ops.torchcram.sparse_conv2d(
        images, packed, None, None, features, unpadded, by_images, False
    )
    return columns_of_weight.flatten(1).t().reshape(features, channels, rows, columns).contiguous()


def is_channels_last(x: Tensor) -> bool:
    """Returns whether torch takes a tensor of four dimensions for one in the channels_last format.

    It goes by strides, as the convolutions of torch do: with one channel, or images of one pixel,
    the same memory may be said to be in either format.
    """
    sizes, strides = x.shape, x.stride()
    if sizes[1] > 1 and sizes[2] * sizes[3] > 1 and x.is_contiguous():
        return False  # told faster than below
    least = 0
    for dimension in (1, 3, 2, 0):
        if sizes[dimension] == 0 or strides[dimension] == 0 or strides[dimension] < least:
            return False
        if dimension == 0 and least == strides[1]:
            return False
        least = strides[dimension] * max(sizes[dimension], 1)
    return True


def images_innermost(x: Tensor) -> Tensor:
    """Returns images (images, channels, rows, columns) as the kernels by images lay them out."""
    return x.permute(_INNERMOST).contiguous().permute(_BACK)


def _output_size(x: Tensor, shape: Geometry, features: int) -> tuple[int, ...]:
    require_floats(x)
    if x.dim() != 4:
        raise ValueError(f"x is of shape {tuple(x.shape)}, not (images, channels, rows, columns)")
    images, _, height, width = x.shape
    rows, columns = shape.output(height, width)
    if rows < 1 or columns < 1:
        raise ValueError(f"the kernel does not fit images of {height} x {width}: {shape}")
    return images, features, rows, columns


def _geometry(numbers: Sequence[int]) -> Geometry:
    return _geometry_of(tuple(numbers))


@functools.lru_cache(maxsize=1024)
def _geometry_of(numbers: tuple[int, ...]) -> Geometry:
    if len(numbers) != 8:
        raise ValueError(f"{numbers} is no geometry: it takes 4 pairs")
    pairs = [(numbers[i], numbers[i + 1]) for i in range(0, 8, 2)]
    return Geometry(*pairs)


def _output_layout(x: Tensor, *, by_images: bool, channels_last: bool) -> tuple[int, ...]:
    """Returns the dimensions of the output from the outermost to the innermost in memory."""
    if is_channels_last(x):
        return _CHANNELS_LAST
    if by_images and not x.is_contiguous() and x.permute(_INNERMOST).is_contiguous():
        return _INNERMOST
    return _CHANNELS_LAST if channels_last and len(x) else _CONTIGUOUS  # as torch has it


def _empty(x: Tensor, size: tuple[int, ...], layout: tuple[int, ...]) -> Tensor:
    if layout == _CONTIGUOUS:
        return x.new_empty(size)
    back = [layout.index(dimension) for dimension in range(4)]
    return x.new_empty([size[dimension] for dimension in layout]).permute(back)


def _laid_out(residual: Tensor | None, y: Tensor, by_images: bool) -> Tensor | None:
    if residual is None:
        return None
    residual = as_large_as(y, residual)
    return residual.permute(_INNERMOST).contiguous() if by_images else residual.contiguous()


def _padded(x: Tensor, shape: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """Returns [image][channel][remainder of the column][row][column], and its rows and columns."""
    (top, left), stride = shape.padding, shape.stride[1]
    height, width = x.shape[2:]
    size = height + 2 * top, -(-(width + 2 * left) // stride)
    x = x.contiguous()
    if not (top or left or stride > 1):
        return x, size
    y = x.new_empty((*x.shape[:2], stride, *size))
    planes = x.shape[0] * x.shape[1]
    kernels().torchcram_pad(
        *(x.data_ptr(), planes, height, width, top, left, *size, stride, y.data_ptr()),
        torch.get_num_threads(),
    )
    return y, size


register("sparse_conv2d", _sparse_conv2d, shape=_sparse_conv2d_shape, dense=_dense_conv2d)
