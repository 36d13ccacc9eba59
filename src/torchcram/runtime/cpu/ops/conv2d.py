"""Convolutions.

The kernels read and write [image][channel][row][column] or, with `by_images`,
[row][column][channel][image]. Outputs have the memory format of the inputs, and channels_last if
those of a dense convolution would have it.

With `by_images`, the images may be cut into tiles (`torchcram.runtime.cpu.ops.image_layout`), so
that 16 tiles of one image are computed like 16 images. Inputs, residual and outputs are tiles then.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.activation_memory import empty_activations
from torchcram.runtime.cpu.memory_format import (
    CONTIGUOUS,
    IMAGES_INNERMOST,
    empty_images,
    output_dim_order,
)
from torchcram.runtime.cpu.ops.common import (
    expand_residual,
    pointer,
    register,
    require_floats,
    require_rows,
)
from torchcram.runtime.cpu.ops.image_layout import (
    cut_into_tiles,
    images_innermost,
    images_outermost,
    join_tiles,
)
from torchcram.runtime.cpu.packing import (
    NOT_CUT,
    PANEL_IMAGES,
    Geometry,
    check_packed,
    convolution_struct,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    tiles: Sequence[int] = NOT_CUT,
) -> Tensor:
    rows = rows_of(packed)
    require_rows("bias", bias, rows)
    shape = _geometry(tuple(geometry))
    size = _output_size(x, shape, features)
    cut = (tiles[0], tiles[1])
    _check_tiles(x, shape, cut, by_images=by_images)
    batch, channels = x.shape[:2]
    native = IMAGES_INNERMOST if by_images else CONTIGUOUS
    y = empty_images(empty_activations, size, native)
    residual = _expand_residual(residual, y, by_images)
    if by_images:
        used, images, padded = x, images_innermost(x), (x.shape[2], x.shape[3])
    else:
        used, shape = _used_pixels(x, shape)
        images, padded = _pad(used, shape)
    computed = rows == features and kernels().torchcram_convolution(
        images.data_ptr(),
        convolution_struct(shape, batch, channels, (used.shape[2], used.shape[3]), padded, cut),
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
    if not computed:
        check_packed(packed)  # raises if it was overwritten without torch noticing
        raise ValueError(
            f"the packed matrix does not hold {shape} from {channels} channels to {features}"
        )
    dim_order = output_dim_order(x, by_images=by_images, channels_last=channels_last)
    if dim_order == native:
        return y
    if dim_order == CONTIGUOUS:
        return images_outermost(y)
    return empty_images(x.new_empty, size, dim_order).copy_(y)


def _fake_conv2d(
    x: Tensor,
    _packed: Tensor,
    _bias: Tensor | None,
    _residual: Tensor | None,
    features: int,
    geometry: Sequence[int],
    by_images: bool,
    _relu: bool,
    channels_last: bool = False,
    _tiles: Sequence[int] = NOT_CUT,
) -> Tensor:
    size = _output_size(x, _geometry(tuple(geometry)), features)
    dim_order = output_dim_order(x, by_images=by_images, channels_last=channels_last)
    return empty_images(x.new_empty, size, dim_order)


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
    tiles: Sequence[int] = NOT_CUT,
) -> Tensor:
    shape = _geometry(tuple(geometry))
    _output_size(x, shape, features)  # raises if `x` is no batch of images
    weight = unpack_conv2d(packed, x.shape[1], features, geometry, by_images=by_images)
    if channels_last:
        weight = weight.contiguous(memory_format=torch.channels_last)
    whole = join_tiles(x, tiles)
    y = functional.conv2d(whole, weight, bias, shape.stride, shape.padding, shape.dilation)
    y = cut_into_tiles(y, tiles)
    y = y if residual is None else y + expand_residual(y, residual)
    return functional.relu(y) if relu else y


def unpack_conv2d(
    packed: Tensor, channels: int, features: int, geometry: Sequence[int], *, by_images: bool
) -> Tensor:
    """Returns the dense weight (features, channels, rows, columns) of a packed convolution.

    Args:
        packed: Packed matrix of the convolution.
        channels: Number of input channels.
        features: Number of output channels.
        geometry: Kernel size, stride, padding and dilation, (rows, columns) of each.
        by_images: Whether the matrix was packed for panels of images.

    Raises:
        ValueError: If the packed matrix has another shape.
    """
    shape = _geometry(tuple(geometry))
    (rows, columns), (down, right) = shape.kernel, shape.dilation
    count = channels * rows * columns
    # One image for each weight of a kernel: as large as the kernel, with a one at that weight.
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


def _output_size(x: Tensor, shape: Geometry, features: int) -> tuple[int, ...]:
    require_floats(x)
    if x.dim() != 4:
        raise ValueError(f"x is of shape {tuple(x.shape)}, not (images, channels, rows, columns)")
    images, _, height, width = x.shape
    rows, columns = shape.output(height, width)
    if rows < 1 or columns < 1:
        raise ValueError(f"the kernel does not fit images of {height} x {width}: {shape}")
    return images, features, rows, columns


def _check_tiles(x: Tensor, shape: Geometry, tiles: tuple[int, int], *, by_images: bool) -> None:
    """Checks that the kernels can convolve a batch of tiles."""
    if tiles == NOT_CUT:
        return
    if not by_images or min(tiles) < 1 or PANEL_IMAGES % (tiles[0] * tiles[1]):
        raise ValueError(
            f"tiles must be 1, 2, 4, 8 or 16 in all and need panels of images, got {tiles}"
        )
    size = (x.shape[2] * tiles[0], x.shape[3] * tiles[1])
    if len(x) % (tiles[0] * tiles[1]) or not shape.fits_tiles(size, tiles):
        raise ValueError(
            f"{len(x)} tiles of {x.shape[2]} x {x.shape[3]} pixels, {tiles} of an image, cannot be "
            f"convolved by {shape}"
        )


@functools.lru_cache(maxsize=1024)
def _geometry(numbers: tuple[int, ...]) -> Geometry:
    if len(numbers) != 8:
        raise ValueError(f"geometry must have 8 numbers, got {numbers}")
    pairs = [(numbers[i], numbers[i + 1]) for i in range(0, 8, 2)]
    return Geometry(*pairs)


def _expand_residual(residual: Tensor | None, y: Tensor, by_images: bool) -> Tensor | None:
    if residual is None:
        return None
    residual = expand_residual(y, residual)
    return images_innermost(residual) if by_images else residual.contiguous()


def _used_pixels(x: Tensor, shape: Geometry) -> tuple[Tensor, Geometry]:
    """Returns the pixels that a convolution reads, if it skips some, and its geometry on them."""
    if shape.kernel != (1, 1) or shape.padding != (0, 0):
        return x, shape
    down, right = shape.stride
    return x[..., ::down, ::right], Geometry((1, 1))


def _pad(x: Tensor, shape: Geometry) -> tuple[Tensor, tuple[int, int]]:
    """Returns padded images [image][channel][remainder][row][column] and their rows and columns."""
    (top, left), stride = shape.padding, shape.stride[1]
    height, width = x.shape[2:]
    size = height + 2 * top, -(-(width + 2 * left) // stride)
    x = x.contiguous()
    if not (top or left or stride > 1):
        return x, size
    y = empty_activations((*x.shape[:2], stride, *size))
    planes = x.shape[0] * x.shape[1]
    kernels().torchcram_pad(
        *(x.data_ptr(), planes, height, width, top, left, *size, stride, y.data_ptr()),
        torch.get_num_threads(),
    )
    return y, size


register(
    "sparse_conv2d(Tensor x, Tensor packed, Tensor? bias, Tensor? residual, SymInt features, "
    "int[] geometry, bool by_images, bool relu, bool channels_last=False, int[2] tiles=1) "
    "-> Tensor",
    _sparse_conv2d,
    fake=_fake_conv2d,
    dense=_dense_conv2d,
)
