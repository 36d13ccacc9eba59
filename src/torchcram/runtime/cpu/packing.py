"""Packing sparse matrices for the CPU kernels, as tensors of bytes."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels, level
from torchcram.runtime.cpu.tensor_cache import TensorCache

if TYPE_CHECKING:
    from collections.abc import Callable

PANEL_IMAGES = 16  # images, or tiles of them, in a panel: kImages in packed.h
NOT_CUT = (1, 1)  # tiles of an image, down and across
PAIRS, QUAD_ROWS = 2, 3  # layouts of a packed matrix, convolution_struct in packed.h
_FORMER_MAGICS = (b"CRAM1\0\0\0", b"CRAM2\0\0\0")
_ALIGNMENT = 8  # bytes
_ROWS_AT = 16  # byte of the header that holds the number of rows
_MOST = 2**31 - 1
_PAIRS_FROM = 0.88  # sparsity; below it, rows share enough columns for quad rows to pay
_BLOCK = 128  # columns; their panel of 64 tokens leaves room in L1


@dataclass(frozen=True)
class Geometry:
    """Geometry of a two-dimensional convolution; every attribute is a pair (rows, columns).

    Attributes:
        kernel: Size of the kernel.
        stride: Step from one output to the next.
        padding: Number of zeros on each side.
        dilation: Distance between kernel elements.

    Raises:
        ValueError: If a number is too small or larger than any image.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        """Checks that the kernels can compute with the numbers."""
        numbers = (*self.kernel, *self.stride, *self.dilation)
        if min(numbers) < 1 or min(self.padding) < 0 or max(*numbers, *self.padding) > _MOST:
            raise ValueError(
                f"kernel, stride and dilation must be in [1, {_MOST}], padding in [0, {_MOST}], "
                f"got {self}"
            )

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of the output for an input of this height and width."""
        sides = []
        for side, size in enumerate((height, width)):
            reach = self.dilation[side] * (self.kernel[side] - 1) + 1
            sides.append((size + 2 * self.padding[side] - reach) // self.stride[side] + 1)
        return sides[0], sides[1]

    def fits_tiles(self, size: tuple[int, int], tiles: tuple[int, int]) -> bool:
        """Returns whether the kernels can convolve images that are cut into tiles.

        Outputs of a tile have to be a tile of the outputs, and need no pixel beyond the next tiles.

        Args:
            size: Height and width of an image.
            tiles: Numbers of tiles of an image, down and across.
        """
        outputs = self.output(*size)
        for side, count in enumerate(tiles):
            if count == 1:
                continue
            (whole, rest), (out, out_rest) = divmod(size[side], count), divmod(outputs[side], count)
            stride, padding = self.stride[side], self.padding[side]
            last = (out - 1) * stride - padding + self.dilation[side] * (self.kernel[side] - 1)
            if rest or out_rest or out * stride != whole or padding > whole or last >= 2 * whole:
                return False
        return True


@functools.lru_cache(maxsize=1024)
def convolution_struct(
    geometry: Geometry,
    batch: int,
    channels: int,
    size: tuple[int, int],
    padded: tuple[int, int],
    tiles: tuple[int, int] = NOT_CUT,
) -> ctypes.Array[ctypes.c_int64]:
    """Returns a convolution as the kernels take it: `Convolution` in packed.h.

    Args:
        geometry: Geometry of the convolution.
        batch: Number of images, or of tiles.
        channels: Number of input channels.
        size: Rows and columns of an image, or of a tile.
        padded: Rows and columns of an image as it is passed to the kernels.
        tiles: Numbers of tiles of an image, down and across.
    """
    pairs = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    numbers = [batch, channels, *padded, *(number for pair in pairs for number in pair)]
    numbers += [*geometry.output(*size), *tiles]
    return (ctypes.c_int64 * len(numbers))(*numbers)


def pack_linear(weight: Tensor, *, layout: int | None = None) -> Tensor:
    """Packs a matrix (outputs, inputs) for Linear layers and for panels of pixels.

    Args:
        weight: Weight whose first dimension is the outputs; the others are flattened.
        layout: `PAIRS` or `QUAD_ROWS`; by default the faster one for this sparsity.

    Raises:
        ValueError: If the weight is empty.
    """
    weight = _matrix(weight)
    layout = layout or _layout_for(weight)
    call = kernels().torchcram_pack_linear
    rows, inner = weight.shape
    return _packed(
        lambda out, room: call(weight.data_ptr(), rows, inner, layout, _BLOCK, out, room)
    )


def pack_int8(weight: Tensor) -> Tensor:
    """Packs an int8 matrix: four neighbouring weights of a row become one value."""
    outputs, inputs = weight.shape
    whole = torch.zeros(outputs, (inputs + 3) // 4 * 4, dtype=torch.int8)
    whole[:, :inputs] = weight
    words = whole.view(torch.int32).view(torch.float32)  # bit patterns; packing only moves them
    return pack_linear(words, layout=PAIRS)


def pack_images(weight: Tensor, geometry: Geometry, *, layout: int | None = None) -> Tensor:
    """Packs the weight of a convolution for panels of images.

    Args:
        weight: Weight (outputs, inputs, rows, columns).
        geometry: Geometry of the convolution.
        layout: `PAIRS` or `QUAD_ROWS`; by default the faster one for this sparsity.

    Raises:
        ValueError: If the weight has another kernel size or is empty, or the kernel is too large.
    """
    if weight.shape[2:] != geometry.kernel:
        raise ValueError(
            f"the geometry has a kernel of {geometry.kernel}, but the weight is of shape "
            f"{tuple(weight.shape)}"
        )
    channels, weight = weight.shape[1], _matrix(weight)
    shape = convolution_struct(geometry, 1, channels, geometry.kernel, geometry.kernel)
    layout = layout or _layout_for(weight)
    call = kernels().torchcram_pack_images
    rows = weight.shape[0]
    return _packed(lambda out, room: call(weight.data_ptr(), rows, layout, shape, out, room))


def check_packed(packed: Tensor) -> None:
    """Checks that a tensor is a packed matrix that the kernels can trust.

    Raises:
        ValueError: If it is not.
    """
    good = packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous()
    good = good and not packed.is_meta
    here = _aligned(packed.cpu()) if good else packed
    if not good or not kernels().torchcram_check(here.data_ptr(), here.numel()):
        raise ValueError(
            f"{packed.numel()} values of {packed.dtype} are not a packed sparse matrix"
            f"{_hint(here) if good else ''}"
        )


def _hint(packed: Tensor) -> str:
    if packed.numel() >= 8 and bytes(packed[:8].tolist()) in _FORMER_MAGICS:
        return ": it was packed by an earlier version of torchcram, prepare the model again"
    return ""


_rows: TensorCache[int] = TensorCache()


def rows_of(packed: Tensor) -> int:
    """Returns the number of rows of a packed matrix, and checks it if it is new or has changed.

    A matrix made in inference mode is checked every time; `owned` returns one whose changes torch
    counts. After writes that torch does not see results are wrong, but the kernels stay within
    their memory.

    Raises:
        ValueError: If it is not a packed matrix, or is not aligned in memory.
    """
    return _rows.get(packed, _checked_rows)


def _checked_rows(packed: Tensor) -> int:
    address = packed.data_ptr()
    if address % _ALIGNMENT:
        raise ValueError(
            f"a packed matrix must be aligned to {_ALIGNMENT} bytes in memory: clone it"
        )
    check_packed(packed)
    return ctypes.c_int64.from_address(address + _ROWS_AT).value


def owned(packed: Tensor) -> Tensor:
    """Returns a packed matrix for a layer to keep, copied if necessary.

    It is aligned for the kernels, and torch counts its changes because it was not made in inference
    mode.
    """
    with torch.inference_mode(False):
        return packed.clone() if packed.is_inference() else _aligned(packed)


def _aligned(packed: Tensor) -> Tensor:
    return packed.clone() if packed.data_ptr() % _ALIGNMENT else packed


def _matrix(weight: Tensor) -> Tensor:
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} cannot be packed: it must have at least one "
            "row and one column"
        )
    return weight.detach().to("cpu", torch.float32).flatten(1).contiguous()


def _layout_for(weight: Tensor) -> int:
    # AVX-512 and NEON have enough registers for the sums of four rows.
    roomy = level() in ("avx512", "neon", "neon_dotprod")
    return QUAD_ROWS if roomy and _sparsity(weight) < _PAIRS_FROM else PAIRS


def _sparsity(weight: Tensor) -> float:
    return 1 - int(torch.count_nonzero(weight)) / max(weight.numel(), 1)


def _packed(call: Callable[[int | None, int], int]) -> Tensor:
    size = call(None, 0)
    if size < 0:
        raise ValueError("the kernel of this convolution is too large for the sparse kernels")
    with torch.inference_mode(False):  # so that torch counts its changes
        packed = torch.empty(size, dtype=torch.uint8)
    call(packed.data_ptr(), size)
    return packed
