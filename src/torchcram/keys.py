"""The integers that selection orders weights by, a block at a time.

The key of a value is its bit pattern without the sign, an integer that orders as the magnitude does
(infinities above all numbers, NaN above those).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 20  # elements treated at a time, so that what is computed on the way stays small
CUDA_BLOCKS = 16  # blocks in one on a GPU, where a wait costs more than memory
_INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


def magnitude_keys(tensor: Tensor) -> Tensor:
    """Returns integers that order as the magnitudes of `tensor` do."""
    integer = _integer(tensor.dtype)
    return tensor.detach().view(integer) & torch.iinfo(integer).max


def _integer(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _INTEGERS:
        allowed = ", ".join(map(str, _INTEGERS))
        raise ValueError(f"magnitudes of {dtype} cannot be ranked; allowed: {allowed}")
    return _INTEGERS[dtype]


def key_bits(tensors: Sequence[Tensor]) -> int:
    """Returns how many bits a key of these tensors, all of one dtype, has."""
    return torch.iinfo(_INTEGERS[tensors[0].dtype]).bits - 1


def comparable(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns `tensors` in one dtype, the smallest that holds all their values."""
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        _integer(dtype)
    if len(dtypes) == 1:
        return tensors
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return [tensor.to(wide) for tensor in tensors]


class Blocks:
    """The keys of `tensors`, a block at a time, as often as asked for."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[Tensor]:
        for run in runs(self.tensors):
            for block in _flat(run).split(block_size(run[0])):
                yield magnitude_keys(block)


def block_size(tensor: Tensor) -> int:
    """Returns how many elements to treat at a time where `tensor` is."""
    return BLOCK * CUDA_BLOCKS if tensor.is_cuda else BLOCK


def runs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields tensors in order, small ones several at a time: no more than a block together."""
    run: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if run and (size + tensor.numel() > block_size(tensor) or tensor.device != run[0].device):
            yield run
            run, size = [], 0
        run.append(tensor)
        size += tensor.numel()
    if run:
        yield run


def _flat(run: Sequence[Tensor]) -> Tensor:
    parts = [tensor.detach().reshape(-1) for tensor in run]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
