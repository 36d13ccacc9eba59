"""Copies between images as the outermost and as the innermost dimension in memory.

Images may also be cut into tiles, which are treated like images: those of an image follow each
other in the first dimension, row by row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.activation_memory import empty_activations
from torchcram.runtime.cpu.memory_format import CONTIGUOUS, IMAGES_INNERMOST, empty_images
from torchcram.runtime.cpu.ops.common import register
from torchcram.runtime.cpu.packing import NOT_CUT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def images_innermost(x: Tensor, tiles: Sequence[int] = NOT_CUT) -> Tensor:
    """Returns images, or the tiles that they are cut into, as the innermost dimension in memory.

    Args:
        x: Images (images, channels, rows, columns).
        tiles: Numbers of tiles of an image, down and across.
    """
    if tuple(tiles) == NOT_CUT and x.permute(IMAGES_INNERMOST).is_contiguous():
        return x
    y: Tensor = torch.ops.torchcram.lay_out_images(x, True, tiles)
    return y


def images_outermost(x: Tensor) -> Tensor:
    """Returns a batch of images in the contiguous memory format."""
    if x.is_contiguous():
        return x.flatten().view(x.shape)  # the strides of a dimension with one index may differ
    y: Tensor = torch.ops.torchcram.lay_out_images(x, False)
    return y


def cut_into_tiles(x: Tensor, tiles: Sequence[int]) -> Tensor:
    """Returns the tiles of images as a batch (images * tiles, channels, rows, columns).

    Args:
        x: Images (images, channels, rows, columns).
        tiles: Numbers of tiles of an image, down and across.

    Raises:
        ValueError: If the images cannot be cut into tiles of equal size.
    """
    images, channels, height, width = _tile_sizes(x, tiles, cut=True)
    x = x.reshape(images, channels, tiles[0], height, tiles[1], width)
    return x.permute(0, 2, 4, 1, 3, 5).reshape(
        images * tiles[0] * tiles[1], channels, height, width
    )


def join_tiles(x: Tensor, tiles: Sequence[int]) -> Tensor:
    """Returns the images of a batch of tiles, the inverse of `cut_into_tiles`.

    Args:
        x: Tiles (images * tiles, channels, rows, columns).
        tiles: Numbers of tiles of an image, down and across.

    Raises:
        ValueError: If the batch does not consist of whole images.
    """
    images, channels, height, width = _tile_sizes(x, tiles, cut=False)
    x = x.reshape(images, *tiles, channels, height, width).permute(0, 3, 1, 4, 2, 5)
    return x.reshape(images, channels, tiles[0] * height, tiles[1] * width)


def _tile_sizes(x: Tensor, tiles: Sequence[int], *, cut: bool) -> tuple[int, int, int, int]:
    """Returns the number of images and of channels, and the height and width of a tile."""
    count, channels, height, width = x.shape
    down, across = tiles
    if min(tiles) < 1:
        raise ValueError(f"numbers of tiles must be at least 1, got {tuple(tiles)}")
    if cut:
        if height % down or width % across:
            raise ValueError(f"images of {height} x {width} cannot be cut into {down} x {across}")
        return count, channels, height // down, width // across
    if count % (down * across):
        raise ValueError(f"{count} tiles are no whole images of {down} x {across} tiles")
    return count // (down * across), channels, height, width


def _lay_out_images(x: Tensor, innermost: bool, tiles: Sequence[int] = NOT_CUT) -> Tensor:
    source = CONTIGUOUS if innermost else IMAGES_INNERMOST
    fast = x.dtype == torch.float32 and x.permute(source).is_contiguous()
    if not fast:
        return _dense_lay_out_images(x, innermost, tiles)
    y = _empty_in_layout(x, tiles, innermost=innermost, empty=empty_activations)
    images, channels, height, width = _tile_sizes(x, tiles, cut=innermost)
    if tuple(tiles) == NOT_CUT:
        sizes = (images, channels, height * width)
        kernels().torchcram_reverse_dimensions(
            *(x.data_ptr(), *(sizes if innermost else sizes[::-1]), y.data_ptr()),
            torch.get_num_threads(),
        )
        return y
    copy = kernels().torchcram_cut_tiles if innermost else kernels().torchcram_join_tiles
    copy(
        *(x.data_ptr(), images, channels, height, width, *tiles, y.data_ptr()),
        torch.get_num_threads(),
    )
    return y


def _fake_lay_out_images(x: Tensor, innermost: bool, tiles: Sequence[int] = NOT_CUT) -> Tensor:
    return _empty_in_layout(x, tiles, innermost=innermost, empty=x.new_empty)


def _empty_in_layout(
    x: Tensor,
    tiles: Sequence[int],
    *,
    innermost: bool,
    empty: Callable[[tuple[int, ...]], Tensor],
) -> Tensor:
    images, channels, height, width = _tile_sizes(x, tiles, cut=innermost)
    down, across = tiles
    if innermost:
        size = (images * down * across, channels, height, width)
        return empty_images(empty, size, IMAGES_INNERMOST)
    return empty_images(empty, (images, channels, down * height, across * width), CONTIGUOUS)


def _dense_lay_out_images(x: Tensor, innermost: bool, tiles: Sequence[int] = NOT_CUT) -> Tensor:
    if not innermost:
        return join_tiles(x, tiles).clone(memory_format=torch.contiguous_format)
    back = [IMAGES_INNERMOST.index(dimension) for dimension in range(4)]
    x = cut_into_tiles(x, tiles).permute(IMAGES_INNERMOST)
    return x.clone(memory_format=torch.contiguous_format).permute(back)


register(
    "lay_out_images(Tensor x, bool innermost, int[2] tiles=1) -> Tensor",
    _lay_out_images,
    fake=_fake_lay_out_images,
    dense=_dense_lay_out_images,
)
