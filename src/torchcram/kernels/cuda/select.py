"""Selection of the largest magnitudes, in one launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch._utils import _unflatten_dense_tensors

from torchcram.kernels.cuda.access import _fresh, _wait_for_all
from torchcram.kernels.cuda.mask import _add_up, _settle, _write_masks
from torchcram.kernels.cuda.rank import (
    BINS,
    PASSES,
    STATE,
    _add_bins,
    _count,
    _descend,
    _guess,
    _refine,
)
from torchcram.kernels.cuda.table import (
    CHUNK,
    INFO,
    KEYS,
    ROW,
    WARPS,
    Layout,
    _addresses,
    _all_contiguous,
    _flat,
    _kept,
    _on_device,
    _pointers,
    layout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PROGRAMS = 4  # per multiprocessor, all running at the same time
REGISTERS = 128  # per thread, so that they fit
STRIDE = 8  # of many chunks, one in so many is looked at first
PART = 1024  # fine bins that a program adds up at a time
DEPTH, SHALLOW = 7, 3  # bits that fine bins go deeper than coarse ones, for many chunks and for few
SIGNALS = tl.constexpr(PASSES.value + 2)  # arrivals, segments unknown after each pass, unsettled


@triton.jit
def _select_kernel(
    table, keep, scratch, mask, chunk_count, tensor_count, segment_count,
    STRIDE: tl.constexpr, PARTS: tl.constexpr, DEPTH: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Finds the k-th key of every segment and writes the masks."""
    rows = table
    info = rows + chunk_count * ROW
    segments = info + tensor_count * INFO
    state = scratch
    words = (scratch + segment_count * STATE).to(tl.pointer_type(tl.int32))
    found = words + SIGNALS
    until = found + chunk_count
    coarse = until + chunk_count
    counts = coarse + segment_count * BINS
    unsettled = words + PASSES + 1  # segments in which position decides among ties
    me = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = (me.to(tl.int64) * chunk_count // programs).to(tl.int32)
    end = ((me.to(tl.int64) + 1) * chunk_count // programs).to(tl.int32)
    for segment in range(me, segment_count, programs):
        _guess(segment, rows, segments, keep, state, unsettled, KEY, SIGN, SIZE)
    _wait_for_all(words, 1, programs)
    turn = 1
    bins = counts
    if STRIDE > 1:
        _count(begin, end, STRIDE, rows, state, bins, True, DEPTH, KEY, SIGN, ALIGNED, SIZE)
        _wait_for_all(words, 2, programs)
        _add_bins(me, programs, segment_count, state, bins, coarse, PARTS, DEPTH)
        _wait_for_all(words, 3, programs)
        for segment in range(me, segment_count, programs):
            _refine(segment, segments, state, coarse)
        _wait_for_all(words, 4, programs)
        turn = 4
        bins += segment_count * (BINS << DEPTH)
    unknown = segment_count
    for one in range(PASSES):
        if unknown > 0:
            first = one == 0
            _count(begin, end, 1, rows, state, bins, first, DEPTH, KEY, SIGN, ALIGNED, SIZE)
            _wait_for_all(words, turn + 1, programs)
            _add_bins(me, programs, segment_count, state, bins, coarse, PARTS, DEPTH)
            _wait_for_all(words, turn + 2, programs)
            for segment in range(me, segment_count, programs):
                _descend(segment, state, bins, coarse, words + one + 1, unsettled, first,
                         DEPTH, SIGN)  # fmt: skip
            _wait_for_all(words, turn + 3, programs)
            turn += 3
            unknown = _fresh(words + one + 1)
            bins += segment_count * (BINS << DEPTH)
    _write_masks(begin, end, rows, info, state, found, mask, KEY, SIGN, ALIGNED, SIZE)
    if _fresh(unsettled) > 0:
        _wait_for_all(words, turn + 1, programs)
        for segment in range(me, segment_count, programs):
            _add_up(segment, segments, found, until, SIZE)
        _wait_for_all(words, turn + 2, programs)
        for chunk in range(begin, end):
            _settle(chunk, rows, info, state, found, until, mask, KEY, SIGN, ALIGNED, SIZE)


def keep_largest(
    tensors: Sequence[Tensor], keep: Sequence[int], segments: Sequence[int]
) -> list[Tensor]:
    """Masks that keep, in each segment, exactly the `keep[segment]` largest magnitudes.

    Args:
        tensors: of one dtype out of `KEYS`, on one device, none empty.
        keep: how many to keep, per segment.
        segments: the segment of each tensor, from 0 up; those of a segment follow one another.
    """
    device, dtype = tensors[0].device, tensors[0].dtype
    segments = tuple(segments)
    contiguous = _all_contiguous(tensors)
    if contiguous:
        layouts = _flat(tuple([tensor.numel() for tensor in tensors]))
    else:
        tensors = [tensor if layout(tensor) else tensor.contiguous() for tensor in tensors]
        layouts = tuple([layout(tensor) or Layout(tensor.numel()) for tensor in tensors])
    pointers, aligned = _pointers(tensors)
    table, rows = _kept(
        _addresses(pointers, layouts, segments, device, itemsize=dtype.itemsize, chunk=CHUNK)
    )
    chunks, groups = len(table.chunks), len(keep)
    programs = min(chunks, _programs(device))
    stride = STRIDE if chunks >= STRIDE * programs else 1
    depth = max((DEPTH if stride > 1 else SHALLOW) - (groups - 1).bit_length(), 0)
    parts = max((BINS.value << depth) // PART, 1) if programs > 1 else 1
    counts = groups * (BINS.value << depth) * (PASSES.value + (stride > 1))
    words = SIGNALS.value + 2 * chunks + groups * BINS.value + counts
    scratch = torch.zeros(STATE.value * groups + -(-words // 2), dtype=torch.int64, device=device)
    mask = torch.empty(table.size, dtype=torch.bool, device=device)
    _select_kernel[programs,](
        rows, _kept(_on_device(tuple(keep), device)), scratch, mask, chunks, len(tensors), groups,
        stride, parts, depth, KEYS[dtype], (1 << (8 * dtype.itemsize - 1)) - 1,
        aligned, CHUNK,
        num_warps=WARPS, maxnreg=REGISTERS, launch_cooperative_grid=True,
    )  # fmt: skip
    if table.packed and contiguous:
        return list(_unflatten_dense_tensors(mask, tensors))  # the same, faster
    return [
        mask.as_strided(tensor.shape, tensor.stride(), offset)
        for tensor, offset in zip(tensors, table.offsets, strict=True)
    ]


@functools.cache
def _programs(device: torch.device) -> int:
    """How many programs run at the same time; one where Triton interprets them one by one."""
    if device.type != "cuda":
        return 1
    return PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)
