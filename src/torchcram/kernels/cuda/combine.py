"""Sums of lists of tensors, in one launch: with masks and a check for NaN, or with a factor.

The bits are those of the operations of torch one after another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from torchcram.kernels.cuda.chunks import (
    CHUNK,
    ROW,
    WARPS,
    _all_contiguous,
    _bits,
    _flat,
    _keep_while_captured,
    _on_device,
    _pointers,
    _table,
    walk_alike,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

FLOATS = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _combine_kernel(
    chunks, tensors, others, masks, bad, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """Replaces a tensor by M * tensor + other, and writes 1.0 to `bad` if a sum is not finite."""
    row = chunks + tl.program_id(0) * ROW
    start = tl.multiple_of(tl.load(row), 16)
    left = tl.load(row + 1)
    number = tl.load(row + 4)
    pointer = tl.load(tensors + number).to(tl.pointer_type(DTYPE))
    other = tl.load(others + number).to(tl.pointer_type(DTYPE))
    address = tl.load(masks + number)
    kept = address.to(tl.pointer_type(tl.int8))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        other = tl.multiple_of(other, 16)
        kept = tl.multiple_of(kept, 16)
    lane = tl.arange(0, SIZE)
    value = _bits(pointer + start, lane, left, SIZE).to(tl.float32)
    if address != 0:  # without a mask everything is kept
        keep = _bits(kept + start, lane, left, SIZE) != 0
        value = tl.where(keep, value, 0.0)
    total = (value + _bits(other + start, lane, left, SIZE).to(tl.float32)).to(DTYPE)
    if left >= SIZE:
        tl.store(pointer + start + lane, total)
    else:
        tl.store(pointer + start + lane, total, mask=lane < left)
    finite = tl.abs(total.to(tl.float32)) < float("inf")  # False for NaN, too
    if tl.min(finite.to(tl.int32)) == 0:
        tl.store(bad, 1.0)


@triton.jit
def _add_scaled_kernel(chunks, tensors, others, scale, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Replaces a tensor of float32 by tensor + scale * other."""
    row = chunks + tl.program_id(0) * ROW
    start = tl.multiple_of(tl.load(row), 16)
    left = tl.load(row + 1)
    number = tl.load(row + 4)
    pointer = tl.load(tensors + number).to(tl.pointer_type(tl.float32))
    other = tl.load(others + number).to(tl.pointer_type(tl.float32))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
        other = tl.multiple_of(other, 16)
    lane = tl.arange(0, SIZE)
    added = _bits(other + start, lane, left, SIZE) * tl.load(scale)
    total = _bits(pointer + start, lane, left, SIZE) + added
    if left >= SIZE:
        tl.store(pointer + start + lane, total)
    else:
        tl.store(pointer + start + lane, total, mask=lane < left)


def can_combine(
    tensors: Sequence[Tensor], others: Sequence[Tensor], masks: Sequence[Tensor | None]
) -> bool:
    """Returns whether `combine_` supports these tensors."""
    first = tensors[0]
    summands = [*tensors, *others]
    if not first.is_cuda or first.dtype not in FLOATS or 0 in [t.numel() for t in tensors]:
        return False
    if len({t.dtype for t in summands}) > 1 or len({t.get_device() for t in summands}) > 1:
        return False
    kept = [mask for mask in masks if mask is not None]
    if _all_contiguous(summands) and _all_contiguous(kept):  # the usual case, checked quickly
        return len({t.get_device() for t in (first, *kept)}) == 1
    return all(
        walk_alike(tensor, other) and (mask is None or walk_alike(tensor, mask))
        for tensor, other, mask in zip(tensors, others, masks, strict=True)
    )


def combine_(
    tensors: Sequence[Tensor],
    others: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    bad: Tensor,
) -> None:
    """Replaces every tensor by M * tensor + other; the bits are those of the operations of torch.

    Args:
        tensors: Tensors of the same dtype in `FLOATS`, on one device, each without gaps in memory.
        others: Tensors to add, with the dtype and the strides of `tensors`.
        masks: Boolean masks with the strides of the tensors; None keeps all of a tensor.
        bad: Tensor of float32, set to 1 if a sum is NaN or infinite, otherwise left as it is.
    """
    device = tensors[0].device
    flat = _flat(tuple([tensor.numel() for tensor in tensors]))
    table = _keep_while_captured(_table(flat, (0,) * len(tensors), device, CHUNK))
    pointers, aligned = _pointers(tensors)
    added, added_aligned = _pointers(others)
    kept = tuple([0 if mask is None else mask.data_ptr() for mask in masks])
    aligned = aligned and added_aligned and max([pointer % 16 for pointer in kept]) == 0
    addresses = _keep_while_captured(
        tuple([_on_device(values, device) for values in (pointers, added, kept)])
    )
    _combine_kernel[len(table.chunks),](
        table.chunks, *addresses, bad, FLOATS[tensors[0].dtype], aligned, CHUNK, num_warps=WARPS,
    )  # fmt: skip


def can_add_scaled(tensors: Sequence[Tensor], others: Sequence[Tensor], scale: Tensor) -> bool:
    """Returns whether `add_scaled_` supports these tensors."""
    alike = scale.is_cuda and scale.dtype == tensors[0].dtype == torch.float32
    return alike and can_combine(tensors, others, [None] * len(tensors))


def add_scaled_(tensors: Sequence[Tensor], others: Sequence[Tensor], scale: Tensor) -> None:
    """Adds scale * other to every tensor; unlike the operations of torch, without a copy of them.

    Args:
        tensors: Tensors of float32, on one device, each without gaps in memory.
        others: Tensors to add, with the strides of `tensors`.
        scale: Factor, a tensor of float32 with one element on the same device.
    """
    device = tensors[0].device
    flat = _flat(tuple([tensor.numel() for tensor in tensors]))
    table = _keep_while_captured(_table(flat, (0,) * len(tensors), device, CHUNK))
    pointers, aligned = _pointers(tensors)
    added, added_aligned = _pointers(others)
    addresses = _keep_while_captured((_on_device(pointers, device), _on_device(added, device)))
    _add_scaled_kernel[len(table.chunks),](
        table.chunks, *addresses, scale, aligned and added_aligned, CHUNK,
        num_warps=WARPS, enable_fp_fusion=False,  # torch rounds the product
    )  # fmt: skip
