"""Sparse matrices packed for the kernels, as tensors of bytes."""

from __future__ import annotations

import ctypes
import functools
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import kernels, level

if TYPE_CHECKING:
    from collections.abc import Callable

PAIRS, QUAD_ROWS = 2, 3
_FORMER_MAGIC = b"CRAM1\0\0\0"
_ALIGNMENT = 8  # bytes
_ROWS_AT = 16  # in the header of a packed matrix, after its magic number and its size
_MOST = 2**31 - 1
_PAIRS_FROM = 0.88  # sparsity: below it, rows share so many columns that fours pay
_BLOCK = 128  # columns whose panel of 64 tokens stays in L1, with room for what passes through


@dataclass(frozen=True)
class Geometry:
    """A two-dimensional convolution: (rows, columns) of each.

    Attributes:
        kernel: its size.
        stride: as in `torch.nn.Conv2d`, like the others.
        padding: zeros on both sides.
        dilation: the distance of kernel elements.

    Raises:
        ValueError: if a number is too small, or no image could be as large.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def __post_init__(self) -> None:
        """Makes sure that the kernels can count with it."""
        numbers = (*self.kernel, *self.stride, *self.dilation)
        if min(numbers) < 1 or min(self.padding) < 0 or max(*numbers, *self.padding) > _MOST:
            raise ValueError(
                f"{self} is no geometry: numbers go from 1, those of padding from 0, to {_MOST}"
            )

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Returns the height and width of the output for those of an input."""
        sides = []
        for side, size in enumerate((height, width)):
            reach = self.dilation[side] * (self.kernel[side] - 1) + 1
            sides.append((size + 2 * self.padding[side] - reach) // self.stride[side] + 1)
        return sides[0], sides[1]


@functools.lru_cache(maxsize=1024)
def described(
    geometry: Geometry, batch: int, channels: int, size: tuple[int, int], padded: tuple[int, int]
) -> ctypes.Array[ctypes.c_int64]:
    """Returns what the kernels want to know about a convolution.

    Args:
        geometry: its stride and the like.
        batch: how many images.
        channels: of each.
        size: their rows and columns.
        padded: the rows and columns that the kernels see.
    """
    pairs = (geometry.kernel, geometry.stride, geometry.padding, geometry.dilation)
    numbers = [batch, channels, *padded, *(number for pair in pairs for number in pair)]
    numbers += geometry.output(*size)
    return (ctypes.c_int64 * len(numbers))(*numbers)


def pack_linear(weight: Tensor, *, layout: int | None = None) -> Tensor:
    """Packs a matrix (outputs, inputs) for Linear layers and convolutions by pixels.

    Raises:
        ValueError: if there is nothing in it.
    """
    weight = _matrix(weight)
    layout = layout or _layout_for(weight)
    call = kernels().torchcram_pack_linear
    rows, inner = weight.shape
    return _packed(
        lambda out, room: call(weight.data_ptr(), rows, inner, layout, _BLOCK, out, room)
    )


def pack_int8(weight: Tensor) -> Tensor:
    """Packs a matrix of int8: four neighbours of a row at a time."""
    outputs, inputs = weight.shape
    whole = torch.zeros(outputs, (inputs + 3) // 4 * 4, dtype=torch.int8)
    whole[:, :inputs] = weight
    words = whole.view(torch.int32).view(torch.float32)  # bits; they are only moved
    return pack_linear(words, layout=PAIRS)


def pack_images(weight: Tensor, geometry: Geometry, *, layout: int | None = None) -> Tensor:
    """Packs the weight of a convolution for panels of images.

    Raises:
        ValueError: if it is of another geometry, empty, or its kernel is too large.
    """
    if weight.shape[2:] != geometry.kernel:
        raise ValueError(f"a weight of {tuple(weight.shape)} has no kernel of {geometry.kernel}")
    channels, weight = weight.shape[1], _matrix(weight)
    shape = described(geometry, 1, channels, geometry.kernel, geometry.kernel)
    layout = layout or _layout_for(weight)
    call = kernels().torchcram_pack_images
    rows = weight.shape[0]
    return _packed(lambda out, room: call(weight.data_ptr(), rows, layout, shape, out, room))


def check_packed(packed: Tensor) -> None:
    """Makes sure that the kernels can trust a tensor.

    Raises:
        ValueError: if it is no packed matrix.
    """
    good = packed.dtype == torch.uint8 and packed.dim() == 1 and packed.is_contiguous()
    good = good and not packed.is_meta
    here = _aligned(packed.cpu()) if good else packed
    if not good or not kernels().torchcram_check(here.data_ptr(), here.numel()):
        raise ValueError(
            f"{packed.numel()} values of {packed.dtype} are no packed sparse matrix"
            f"{_hint(here) if good else ''}"
        )


def _hint(packed: Tensor) -> str:
    if packed.numel() >= 8 and bytes(packed[:8].tolist()) == _FORMER_MAGIC:
        return ": an earlier version of torchcram packed it, prepare the model again"
    return ""


class _Known(NamedTuple):
    """A packed matrix that has been checked: which one, what its state was then, and its rows."""

    tensor: weakref.ref[Tensor]
    state: tuple[int, int, int | None]
    rows: int


_known: dict[int, _Known] = {}


def rows_of(packed: Tensor) -> int:
    """Returns how many rows a packed matrix has, which is checked where it is new or has changed.

    It is known by identity: its memory alone may be that of another one by now. Torch counts the
    changes of a tensor, but not those of one made in inference mode, which is therefore checked
    every time; `owned` makes one of the other kind. What is written behind the back of torch may
    not be noticed: results are wrong then, but the kernels stay within their memory.

    Raises:
        ValueError: if it is no packed matrix, or the kernels cannot read it where it lies.
    """
    version = None if packed.is_inference() else packed._version
    address, key = packed.data_ptr(), id(packed)
    state = address, packed.numel(), version
    known = _known.get(key)
    if known is not None and known.state == state and known.tensor() is packed:
        return known.rows
    if address % _ALIGNMENT:
        raise ValueError(
            f"a packed matrix must lie at a multiple of {_ALIGNMENT} bytes in memory: clone it"
        )
    check_packed(packed)
    rows = ctypes.c_int64.from_address(address + _ROWS_AT).value
    if version is not None:
        _known[key] = _Known(weakref.ref(packed, lambda _: _known.pop(key, None)), state, rows)
    return rows


def owned(packed: Tensor) -> Tensor:
    """Returns a packed matrix for a layer to keep, which is a copy where it has to be.

    The kernels can read it where it lies, and torch counts its changes, because it was not made in
    inference mode.
    """
    with torch.inference_mode(False):
        return packed.clone() if packed.is_inference() else _aligned(packed)


def _aligned(packed: Tensor) -> Tensor:
    return packed.clone() if packed.data_ptr() % _ALIGNMENT else packed


def _matrix(weight: Tensor) -> Tensor:
    if weight.dim() < 2 or weight.numel() == 0:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} cannot be packed: it takes rows and columns, "
            "at least one of each"
        )
    return weight.detach().to("cpu", torch.float32).flatten(1).contiguous()


def _layout_for(weight: Tensor) -> int:
    # The sums of four rows fill the registers that AVX-512 alone has.
    shared = level() == "avx512" and _sparsity(weight) < _PAIRS_FROM
    return QUAD_ROWS if shared else PAIRS


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
