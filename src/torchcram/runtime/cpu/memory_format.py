"""Memory formats of batches of images.

A format is described by its `dim_order`, as in `torch.Tensor.dim_order`: the dimensions of (image,
channel, row, column) from the outermost to the innermost in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

CONTIGUOUS, _CHANNELS_LAST, IMAGES_INNERMOST = (0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 1, 0)


def is_channels_last(x: Tensor) -> bool:
    """Returns whether torch treats a tensor of four dimensions as channels_last.

    Like the convolutions of torch, it looks at the strides: with one channel or one pixel, the same
    memory can be in either format.
    """
    sizes, strides = x.shape, x.stride()
    if sizes[1] > 1 and sizes[2] * sizes[3] > 1 and x.is_contiguous():
        return False  # faster than the loop below
    least = 0
    for dimension in (1, 3, 2, 0):
        if sizes[dimension] == 0 or strides[dimension] == 0 or strides[dimension] < least:
            return False
        if dimension == 0 and least == strides[1]:
            return False
        least = strides[dimension] * max(sizes[dimension], 1)
    return True


def output_dim_order(x: Tensor, *, by_images: bool, channels_last: bool) -> tuple[int, ...]:
    """Returns the dim_order of the outputs of a convolution.

    Args:
        x: Inputs.
        by_images: Whether the kernel computes with panels of images.
        channels_last: Whether the dense weight is channels_last.
    """
    if is_channels_last(x):
        return _CHANNELS_LAST
    if by_images and not x.is_contiguous() and x.permute(IMAGES_INNERMOST).is_contiguous():
        return IMAGES_INNERMOST
    return _CHANNELS_LAST if channels_last and len(x) else CONTIGUOUS  # as in torch


def empty_images(
    empty: Callable[[tuple[int, ...]], Tensor], size: tuple[int, ...], dim_order: tuple[int, ...]
) -> Tensor:
    """Returns an uninitialized batch of images.

    Args:
        empty: Function that returns an uninitialized tensor of a size.
        size: Numbers of images, channels, rows and columns.
        dim_order: Order of the dimensions in memory.
    """
    if dim_order == CONTIGUOUS:
        return empty(size)
    back = [dim_order.index(dimension) for dimension in range(4)]
    return empty(tuple(size[dimension] for dimension in dim_order)).permute(back)
