"""CRC-32, as fast as memory is read."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import find


def checksum(data: Tensor, seen: int = 0) -> int:
    """Returns what `zlib.crc32` does.

    Args:
        data: uint8, flat, on the CPU.
        seen: the checksum of what comes before.
    """
    library = find()
    if data.dtype != torch.uint8:
        raise ValueError(f"checksums are of bytes, not of {data.dtype}")
    data = data.contiguous()
    if library is None:
        return zlib.crc32(data.numpy().data, seen)
    return int(library.torchcram_crc32(data.data_ptr(), data.numel(), seen))
