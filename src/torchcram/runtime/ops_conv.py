"""Sparse convolutions as an operator of torch, `torch.ops.torchcram.sparse_conv2d`.

`by_images` puts images innermost: in memory, inputs and outputs are [row][column][channel][image],
which elementwise operators leave as it is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.native.library import kernels
from torchcram.runtime.ops import as_large_as, operators, pointer, require_floats, require_rows
from torchcram.runtime.packing import Geometry, described, rows_of

if TYPE_CHECKING:
    from collections.abc import Sequence

_INNERMOST = (2, 3, 1, 0)  # [row][column][channel][image] of (image, channel, row, column)
_BACK = (3, 2, 0, 1)

operators.define(
    "sparse_conv2d(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, SymInt features, "
    "int[] geometry, bool by_images, bool relu) -> Tensor"
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
) -> Tensor:
    require_floats(x)
    require_rows("bias", bias, rows_of(packed))
    shape = _geometry(geometry)
    if x.dim() != 4:
        raise ValueError(f"x is of shape {tuple(x.shape)}, not (images, channels, rows, columns)")
    batch, channels, height, width = x.shape
    if min(shape.output(height, width)) < 1:
        raise ValueError(f"the kernel does not fit images of {height} x {width}: {shape}")
    y = _empty_output(x, shape, features, by_images)
    residual = _laid_out(residual, y, by_images)
    padded = height, width
    if by_images:
        x = x.permute(_INNERMOST).contiguous()
    else:
        x, padded = _padded(x, shape)
    good = y.numel() == 0 or kernels().torchcram_convolution(
        x.data_ptr(),
        described(shape, batch, channels, (height, width), padded),
        features,
        packed.data_ptr(),
        by_images,
        pointer(bias),
        pointer(residual),
        int(relu),
        y.data_ptr(),
        torch.get_num_threads(),
    )
    if not good:
        raise ValueError(f"the packed matrix is no {shape} from {channels} channels to {features}")
    return y


def _sparse_conv2d_shape(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    _relu: bool,
) -> Tensor:
    return _empty_output(x, _geometry(geometry), features, by_images)


def _geometry(numbers: Sequence[int]) -> Geometry:
    return _geometry_of(tuple(numbers))


@functools.lru_cache(maxsize=1024)
def _geometry_of(numbers: tuple[int, ...]) -> Geometry:
    if len(numbers) != 8:
        raise ValueError(f"{numbers} is no geometry: it takes 4 pairs")
    pairs = [(numbers[i], numbers[i + 1]) for i in range(0, 8, 2)]
    return Geometry(*pairs)


def _empty_output(x: Tensor, shape: Geometry, features: int, by_images: bool) -> Tensor:
    rows, columns = shape.output(x.shape[2], x.shape[3])
    size = (x.shape[0], features, rows, columns)
    if not by_images:
        return x.new_empty(size)
    return x.new_empty([size[i] for i in _INNERMOST]).permute(_BACK)


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


operators.impl("sparse_conv2d", _sparse_conv2d, "CPU")
torch.library.register_fake("torchcram::sparse_conv2d", _sparse_conv2d_shape, lib=operators)
