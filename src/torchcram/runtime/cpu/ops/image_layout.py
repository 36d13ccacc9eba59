"""Copies between images as the outermost and as the innermost dimension in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.memory_format import CONTIGUOUS, IMAGES_INNERMOST, empty_images
from torchcram.runtime.cpu.ops.common import on_huge_pages, register


def images_innermost(x: Tensor) -> Tensor:
    """Returns a batch of images with the images as the innermost dimension in memory."""
    if x.permute(IMAGES_INNERMOST).is_contiguous():
        return x
    y: Tensor = torch.ops.torchcram.lay_out_images(x, True)
    return y


def images_outermost(x: Tensor) -> Tensor:
    """Returns a batch of images in the contiguous memory format."""
    if x.is_contiguous():
        return x.flatten().view(x.shape)  # the strides of a dimension with one index may differ
    y: Tensor = torch.ops.torchcram.lay_out_images(x, False)
    return y


def _lay_out_images(x: Tensor, innermost: bool) -> Tensor:
    source = CONTIGUOUS if innermost else IMAGES_INNERMOST
    fast = x.dtype == torch.float32 and x.permute(source).is_contiguous()
    if not fast:
        return _dense_lay_out_images(x, innermost)
    y = on_huge_pages(_fake_lay_out_images(x, innermost))
    images, channels, height, width = x.shape
    sizes = (images, channels, height * width)
    kernels().torchcram_reverse_dimensions(
        *(x.data_ptr(), *(sizes if innermost else sizes[::-1]), y.data_ptr()),
        torch.get_num_threads(),
    )
    return y


def _fake_lay_out_images(x: Tensor, innermost: bool) -> Tensor:
    return empty_images(x, tuple(x.shape), IMAGES_INNERMOST if innermost else CONTIGUOUS)


def _dense_lay_out_images(x: Tensor, innermost: bool) -> Tensor:
    if not innermost:
        return x.clone(memory_format=torch.contiguous_format)
    back = [IMAGES_INNERMOST.index(dimension) for dimension in range(4)]
    return x.permute(IMAGES_INNERMOST).clone(memory_format=torch.contiguous_format).permute(back)


register(
    "lay_out_images(Tensor x, bool innermost) -> Tensor",
    _lay_out_images,
    fake=_fake_lay_out_images,
    dense=_dense_lay_out_images,
)
