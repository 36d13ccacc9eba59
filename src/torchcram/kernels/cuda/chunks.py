"""Chunks of a list of tensors: the table of their addresses, and how programs read them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

CHUNK = 2048  # elements processed at a time
WARPS = 4  # warps per chunk
KEYS = {torch.float32: tl.int32, torch.bfloat16: tl.int16, torch.float16: tl.int16}
ROW = tl.constexpr(5)  # columns of Table.chunks
INFO = tl.constexpr(5)  # columns of Table.info
SEGMENT = tl.constexpr(3)  # columns of Table.segments


_T = TypeVar("_T")


class Layout(NamedTuple):
    """Memory layout of a tensor: rows of (channels, spatial), stored as (spatial, channels).

    Attributes:
        numel: Number of elements.
        channels: Number of channels; 1 for a contiguous tensor.
        spatial: Number of pixels; 1 for a contiguous tensor.
    """

    numel: int
    channels: int = 1
    spatial: int = 1


class Table(NamedTuple):
    """The chunks of a list of tensors.

    Attributes:
        chunks: Table (chunks, ROW): first element (`_addresses` turns it into an address), number
            of elements from there to the end of the tensor, offset of the mask, segment, tensor.
        info: Table (tensors, INFO): numel, channels, spatial, first chunk, last chunk.
        segments: Table (segments, SEGMENT): first chunk, number of chunks, numel.
        offsets: Offset of the mask of each tensor in the flat mask.
        size: Size of the flat mask.
        packed: Whether the flat mask has no gaps.
    """

    chunks: Tensor
    info: Tensor
    segments: Tensor
    offsets: tuple[int, ...]
    size: int
    packed: bool


def layout(tensor: Tensor) -> Layout | None:
    """Returns the memory layout of `tensor`, or None if the kernels do not support it."""
    if tensor.is_contiguous():
        return Layout(tensor.numel())
    memory_format = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if memory_format is not None and tensor.is_contiguous(memory_format=memory_format):
        return Layout(tensor.numel(), tensor.shape[1], tensor[0, 0].numel())
    return None


def walk_alike(tensor: Tensor, mask: Tensor) -> bool:
    """Returns whether `zero_unmasked_` supports `tensor` with `mask`."""
    if not mask.is_cuda or tensor.dtype not in KEYS:
        return False
    if tensor.is_contiguous():
        return mask.is_contiguous()
    return tensor.stride() == mask.stride() and layout(tensor) is not None


def _all_contiguous(tensors: Sequence[Tensor]) -> bool:
    return False not in [tensor.is_contiguous() for tensor in tensors]


@functools.lru_cache(maxsize=64)
def _flat(sizes: tuple[int, ...]) -> tuple[Layout, ...]:
    return tuple(Layout(size) for size in sizes)


STREAMS = 32  # number of streams of a device; torch hands out the same ones in turn
_copy_streams: dict[torch.device, torch.cuda.Stream] = {}
_may_pin: ContextVar[bool] = ContextVar("_may_pin", default=True)
_captured: list[object] = []  # tables that CUDA graphs read, kept as long as there may be graphs


@contextmanager
def _outside_captures(device: torch.device) -> Iterator[None]:
    """Keeps a block out of a CUDA graph that is being captured, by running it on another stream.

    The capturing code synchronizes the device before the first replay. The block pins no host
    memory: freeing it records events, which the allocator cannot query during a capture.
    """
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield
        return
    before = _may_pin.set(False)
    try:
        with torch.cuda.stream(_uncaptured_stream(device)):
            yield
    finally:
        _may_pin.reset(before)


def _uncaptured_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the stream that copies tables; another one if that is being captured."""
    for _ in range(STREAMS):
        if device not in _copy_streams:
            _copy_streams[device] = torch.cuda.Stream(device)
        with torch.cuda.stream(_copy_streams[device]):
            if not torch.cuda.is_current_stream_capturing():
                return _copy_streams[device]
        del _copy_streams[device]
    raise RuntimeError("all streams are being captured: there is none to copy tables with")


def _keep_while_captured(table: _T) -> _T:
    """Returns `table`, and keeps it in memory if a CUDA graph is being captured with it."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        _captured.append(table)
    return table


def _to_device(values: Sequence[object], device: torch.device) -> Tensor:
    pinned = device.type == "cuda" and _may_pin.get()
    host = torch.tensor(values, dtype=torch.int64, pin_memory=pinned)
    return host.to(device, non_blocking=pinned)


@functools.lru_cache(maxsize=64)
def _on_device(values: tuple[int, ...], device: torch.device) -> Tensor:
    with _outside_captures(device):
        return _to_device(values, device)


@functools.lru_cache(maxsize=64)
def _table(
    layouts: tuple[Layout, ...], segments: tuple[int, ...], device: torch.device, chunk: int
) -> Table:
    chunks: list[tuple[int, ...]] = []
    groups: dict[int, list[int]] = {}
    info, offsets, size = [], [], 0
    for tensor, (lay, segment) in enumerate(zip(layouts, segments, strict=True)):
        first = len(chunks)
        chunks += [
            (start, lay.numel - start, size + start, segment, tensor)
            for start in range(0, lay.numel, chunk)
        ]
        info.append((*lay, first, len(chunks) - 1))
        offsets.append(size)
        size += -(-lay.numel // 16) * 16  # masks are aligned to 16 bytes
        group = groups.setdefault(segment, [first, 0, 0])
        group[1] = len(chunks) - group[0]
        group[2] += lay.numel
    packed = size == sum(lay.numel for lay in layouts)
    with _outside_captures(device):
        return Table(
            _to_device(chunks, device),
            _to_device(info, device),
            _to_device(list(groups.values()), device),
            offsets=tuple(offsets),
            size=size,
            packed=packed,
        )


@functools.lru_cache(maxsize=256)
def _addresses(
    pointers: tuple[int, ...],
    layouts: tuple[Layout, ...],
    segments: tuple[int, ...],
    device: torch.device,
    *,
    itemsize: int,
    chunk: int,
) -> tuple[Table, Tensor]:
    """Returns a table, and a tensor of its contents with addresses instead of first elements."""
    with _outside_captures(device):
        table = _table(layouts, segments, device, chunk)
        rows = table.chunks.clone()
        rows[:, 0] *= itemsize
        rows[:, 0] += _to_device(pointers, device)[rows[:, 4]]
        return table, torch.cat([rows.view(-1), table.info.view(-1), table.segments.view(-1)])


def _pointers(tensors: Sequence[Tensor]) -> tuple[tuple[int, ...], bool]:
    """Returns the addresses of `tensors`, and whether all are aligned to 16 bytes."""
    pointers = tuple([tensor.data_ptr() for tensor in tensors])
    return pointers, max([pointer % 16 for pointer in pointers]) == 0


# Access from kernels


@triton.jit
def _chunk(row, KEY: tl.constexpr, ALIGNED: tl.constexpr):
    # address, and number of elements up to the end of the tensor
    pointer = tl.load(row).to(tl.pointer_type(KEY))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer, tl.load(row + 1)


@triton.jit
def _bits(pointer, lane, left, SIZE: tl.constexpr):
    # a full chunk is loaded without a mask, in vectors
    if left >= SIZE:
        bits = tl.load(pointer + lane)
    else:
        bits = tl.load(pointer + lane, mask=lane < left, other=0)
    return bits


@triton.jit
def _read(rows, chunk, KEY: tl.constexpr, ALIGNED: tl.constexpr, SIZE: tl.constexpr):
    """Returns the bits of a chunk, the elements up to the end of its tensor, and its segment."""
    row = rows + chunk * ROW
    pointer, left = _chunk(row, KEY, ALIGNED)
    return _bits(pointer, tl.arange(0, SIZE), left, SIZE), left, tl.load(row + 3)


@triton.jit
def _key(bits, lane, left, SIGN: tl.constexpr, SIZE: tl.constexpr):
    # -1 beyond the end of the tensor
    key = bits.to(tl.int32) & SIGN
    if left < SIZE:
        key = tl.where(lane < left, key, -1)
    return key


@triton.jit
def _fresh(pointer):
    # bypasses the L1 cache to read what other programs have written
    return tl.load(pointer, cache_modifier=".cg")


@triton.jit
def _wait_for_all(arrivals, turn, programs):
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1, sem="acq_rel")
    while tl.atomic_add(arrivals, 0, sem="acq_rel") < turn * programs:
        pass
    tl.debug_barrier()
