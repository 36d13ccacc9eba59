"""The order in which the dimensions of a batch of images lie in memory."""

from __future__ import annotations

from torch import Tensor

# Dimensions of (image, channel, row, column), from the outermost to the innermost in memory.
CONTIGUOUS, _CHANNELS_LAST, INNERMOST = (0, 1, 2, 3), (0, 2, 3, 1), (2, 3, 1, 0)
_BACK = (3, 2, 0, 1)  # inverse of INNERMOST


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


def images_innermost(x: Tensor) -> Tensor:
    """Returns a batch of images with the images as the innermost dimension in memory."""
    return x.permute(INNERMOST).contiguous().permute(_BACK)


def output_layout(x: Tensor, *, by_images: bool, channels_last: bool) -> tuple[int, ...]:
    """Returns the dimensions of the output from the outermost to the innermost in memory."""
    if is_channels_last(x):
        return _CHANNELS_LAST
    if by_images and not x.is_contiguous() and x.permute(INNERMOST).is_contiguous():
        return INNERMOST
    return _CHANNELS_LAST if channels_last and len(x) else CONTIGUOUS  # as in torch


def empty_images(x: Tensor, size: tuple[int, ...], layout: tuple[int, ...]) -> Tensor:
    """Returns images of this size without values, like `x` in dtype and device.

    Args:
        x: Tensor whose dtype and device they have.
        size: Numbers of images, channels, rows and columns.
        layout: Dimensions from the outermost to the innermost in memory.
    """
    if layout == CONTIGUOUS:
        return x.new_empty(size)
    back = [layout.index(dimension) for dimension in range(4)]
    return x.new_empty([size[dimension] for dimension in layout]).permute(back)
