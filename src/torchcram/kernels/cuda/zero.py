"""Zeroing tensors by masks, in one launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from torchcram.kernels.cuda.chunks import (
    CHUNK,
    KEYS,
    ROW,
    WARPS,
    _bits,
    _flat,
    _keep_while_captured,
    _on_device,
    _pointers,
    _table,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


@triton.jit
def _zero_kernel(
    chunks, tensors, masks, KEY: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr
):
    """Writes +0 wherever the mask is False."""
    row = chunks + tl.program_id(0) * ROW
    start = tl.multiple_of(tl.load(row), 16)
    left = tl.load(row + 1)
    tensor = tl.load(row + 4)
    pointer = tl.load(tensors + tensor).to(tl.pointer_type(KEY))
    kept = tl.load(masks + tensor).to(tl.pointer_type(tl.int8))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        kept = tl.multiple_of(kept, 16)
    lane = tl.arange(0, SIZE)
    keep = _bits(kept + start, lane, left, SIZE) != 0
    if left >= SIZE:
        bits = tl.load(pointer + start + lane)
        tl.store(pointer + start + lane, tl.where(keep, bits, 0))
    else:
        tl.store(pointer + start + lane, tl.zeros([SIZE], KEY), mask=(lane < left) & ~keep)


def zero_unmasked_(tensors: Sequence[Tensor], masks: Sequence[Tensor]) -> None:
    """Zeroes every tensor where its mask is False.

    Args:
        tensors: Tensors of the same dtype in `KEYS`, on one device, each without gaps in memory.
        masks: Boolean masks with the strides of the tensors.
    """
    device = tensors[0].device
    flat = _flat(tuple([tensor.numel() for tensor in tensors]))
    table = _keep_while_captured(_table(flat, (0,) * len(tensors), device, CHUNK))
    pointers, aligned = _pointers(tensors)
    kept, kept_aligned = _pointers(masks)
    addresses = _keep_while_captured((_on_device(pointers, device), _on_device(kept, device)))
    _zero_kernel[len(table.chunks),](
        table.chunks, *addresses,
        KEYS[tensors[0].dtype], aligned and kept_aligned, CHUNK, num_warps=WARPS,
    )  # fmt: skip
