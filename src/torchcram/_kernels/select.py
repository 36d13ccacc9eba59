"""Selection of the largest magnitudes, in one launch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch._utils import _unflatten_dense_tensors

from torchcram._kernels.access import _fresh, _wait_for_all
from torchcram._kernels.mask import _add_up, _count_ties, _write_mask
from torchcram._kernels.rank import BINS, PASSES, STATE, _count, _descend, _guess
from torchcram._kernels.table import (
    CHUNK,
    KEYS,
    WARPS,
    Layout,
    _all_contiguous,
    _flat,
    _on_device,
    _pointers,
    _rows,
    _table,
    layout,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

PROGRAMS = 4  # per multiprocessor, all running at the same time
REGISTERS = 128  # per thread, so that they fit
COPIES = 8  # of the counts, so that programs seldom add to the same place at the same time


@triton.jit
def _select_kernel(
    rows, info, segments, keep, state, counts, found, until, signals, mask,
    chunk_count, segment_count, COPIES: tl.constexpr,
    KEY: tl.constexpr, SIGN: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Finds the k-th key of every segment and writes the masks."""
    me = tl.program_id(0)
    programs = tl.num_programs(0)
    begin = (me.to(tl.int64) * chunk_count // programs).to(tl.int32)
    end = ((me.to(tl.int64) + 1) * chunk_count // programs).to(tl.int32)
    unsettled = signals + PASSES + 1  # segments in which position decides among ties
    for segment in range(me, segment_count, programs):
        _guess(segment, rows, segments, keep, state, unsettled, KEY, SIGN, SIZE)
    _wait_for_all(signals, 1, programs)
    turn = 1
    unknown = segment_count
    for one in range(PASSES):
        if unknown > 0:
            bins = counts + one * segment_count * COPIES * BINS
            _count(begin, end, rows, state, bins, one == 0, COPIES, KEY, SIGN, ALIGNED, SIZE)
            _wait_for_all(signals, turn + 1, programs)
            for segment in range(me, segment_count, programs):
                _descend(segment, state, bins, signals + one + 1, unsettled, one == 0, COPIES, SIGN)
            _wait_for_all(signals, turn + 2, programs)
            turn += 2
            unknown = _fresh(signals + one + 1)
    if _fresh(unsettled) > 0:
        for chunk in range(begin, end):
            _count_ties(chunk, rows, info, state, found, KEY, SIGN, ALIGNED, SIZE)
        _wait_for_all(signals, turn + 1, programs)
        for segment in range(me, segment_count, programs):
            _add_up(segment, segments, found, until, SIZE)
        _wait_for_all(signals, turn + 2, programs)
    for chunk in range(begin, end):
        _write_mask(chunk, rows, info, state, found, until, mask, KEY, SIGN, ALIGNED, SIZE)


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
    table = _table(layouts, segments, device, CHUNK)
    pointers, aligned = _pointers(tensors)
    rows = _rows(pointers, layouts, segments, device, itemsize=dtype.itemsize, chunk=CHUNK)
    chunks, groups = len(rows), len(keep)
    copies = max(COPIES // groups, 1)
    sizes = [2 * STATE.value * groups, PASSES.value * groups * copies * BINS.value]
    sizes += [chunks, chunks, PASSES.value + 2]
    zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    state, counts, found, until, signals = zeros.split(sizes)
    mask = torch.empty(table.size, dtype=torch.bool, device=device)
    _select_kernel[min(chunks, _programs(device)),](
        rows, table.info, table.segments, _on_device(tuple(keep), device),
        state.view(torch.int64), counts, found, until, signals, mask, chunks, groups, copies,
        KEYS[dtype], (1 << (8 * dtype.itemsize - 1)) - 1, aligned, CHUNK,
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
