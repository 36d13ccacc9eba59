"""Max pooling of images in the contiguous memory format, for which that of torch is slow."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.activation_memory import empty_activations
from torchcram.runtime.cpu.ops.common import register, require_floats
from torchcram.runtime.cpu.packing import Geometry

if TYPE_CHECKING:
    from collections.abc import Sequence


def _max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    size = _output_size(x, kernel, stride, padding)
    x, y = x.contiguous(), empty_activations(size)
    sizes = (*x.shape[2:], *kernel, *stride, *padding, *size[2:])
    computed = kernels().torchcram_max_pool(
        *(x.data_ptr(), size[0] * size[1], (ctypes.c_int64 * len(sizes))(*sizes), y.data_ptr()),
        torch.get_num_threads(),
    )
    if not computed:
        raise ValueError(f"the kernel cannot pool planes with these sizes: {sizes}")
    return y


def _fake_max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    return x.new_empty(_output_size(x, kernel, stride, padding))


def _dense_max_pool2d(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    _output_size(x, kernel, stride, padding)
    return functional.max_pool2d(x, list(kernel), list(stride), list(padding))


def _output_size(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, ...]:
    require_floats(x)
    if x.dim() != 4:
        raise ValueError(f"x is of shape {tuple(x.shape)}, not (images, channels, rows, columns)")
    geometry = Geometry(*((pair[0], pair[1]) for pair in (kernel, stride, padding)))
    if any(2 * pad > size for pad, size in zip(padding, kernel, strict=True)):
        raise ValueError(f"the padding must be at most half of the kernel size: {geometry}")
    rows, columns = geometry.output(*x.shape[2:])
    if min(rows, columns, *x.shape[2:]) < 1:  # a window needs a pixel, not padding alone
        raise ValueError(f"the windows do not fit images of {x.shape[2]} x {x.shape[3]}")
    return x.shape[0], x.shape[1], rows, columns


register(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding) -> Tensor",
    _max_pool2d,
    fake=_fake_max_pool2d,
    dense=_dense_max_pool2d,
)
