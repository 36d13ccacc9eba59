"""Reading artifact files: stored values back to tensors, and checksums."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import find


def expand_(out: Tensor, bits: Tensor, values: Tensor) -> bool:
    """Fills `out` with the next of `values` where a bit is set, with zeros elsewhere.

    Args:
        out: flat, contiguous, on the CPU.
        bits: uint8, at least one bit for each place, lowest first.
        values: of the type of `out`.

    Returns:
        False, with nothing done, where there is no compiled library.

    Raises:
        ValueError: if there are more or fewer values than places.
    """
    library = find()
    if library is None or out.itemsize not in (1, 2, 4, 8):
        return False
    bits, values, size = bits.contiguous(), values.contiguous(), out.itemsize
    if 8 * len(bits) < len(out) or values.dtype != out.dtype or not out.is_contiguous():
        raise ValueError("mask, values and output do not belong together")
    used = library.torchcram_expand(
        bits.data_ptr(), len(out), values.data_ptr(), len(values), size, out.data_ptr()
    )
    if used != len(values):
        raise ValueError(f"it has {len(values)} values, not as many as places")
    return True


def count_ones(bits: Tensor, places: int) -> int | None:
    """Returns how many of the first places of a mask are set; None without a compiled library."""
    library = find()
    if library is None:
        return None
    if 8 * len(bits) < places or bits.dtype != torch.uint8:
        raise ValueError("a mask has a bit for each place")
    return int(library.torchcram_count_ones(bits.contiguous().data_ptr(), places))


def rows_of_table(table: Tensor, numbers: Tensor) -> Tensor | None:
    """Returns the rows of a table, (256, n), that bytes choose; None without a compiled library."""
    library = find()
    if library is None:
        return None
    table, numbers = table.contiguous(), numbers.contiguous()
    wide = table.shape[1] * table.itemsize
    if len(table) != 256 or numbers.dtype != torch.uint8:
        raise ValueError("a byte chooses among 256 rows")
    out = torch.empty(len(numbers) * wide, dtype=torch.uint8)
    library.torchcram_look_up(
        table.data_ptr(), wide, numbers.data_ptr(), len(numbers), out.data_ptr()
    )
    return out


def decode_(
    out: Tensor,
    mask: Tensor | None,
    values: Tensor,
    *,
    stored: int,
    bits: int,
    scales: Tensor | None,
) -> int | None:
    """Puts stored values to their places and multiplies them by their scales.

    Args:
        out: float32, flat, contiguous, on the CPU.
        mask: uint8, at least one bit for each place, lowest first; None where all have a value.
        values: float32, or uint8 that holds integers without gaps.
        stored: how many values there are.
        bits: of integers; 0 for float32.
        scales: float32, one for every so many places of `out`; or None.

    Returns:
        How many values were used, -1 where there are too few; None without a compiled library.
    """
    library = find()
    if library is None:
        return None
    kind = torch.uint8 if bits else torch.float32
    flat = all(tensor is None or tensor.dim() == 1 for tensor in (out, mask, values, scales))
    if not flat or not out.is_contiguous() or not 0 <= bits <= 8 or bits == 1:
        raise ValueError("mask, values, scales and output do not belong together")
    enough = 8 * values.numel() * values.itemsize >= stored * (bits or 32)
    enough = enough and (mask is None or (mask.dtype == torch.uint8 and 8 * len(mask) >= len(out)))
    scaled = scales is None or (
        scales.dtype == torch.float32 and len(scales) > 0 and len(out) % len(scales) == 0
    )
    if not (enough and scaled and values.dtype == kind and out.dtype == torch.float32):
        raise ValueError("mask, values, scales and output do not belong together")
    values = values.contiguous()
    mask = None if mask is None else mask.contiguous()
    scales = None if scales is None else scales.contiguous()
    return int(
        library.torchcram_decode(
            None if mask is None else mask.data_ptr(),
            len(out),
            values.data_ptr(),
            stored,
            bits,
            None if scales is None else scales.data_ptr(),
            1 if scales is None else len(out) // len(scales),
            out.data_ptr(),
        )
    )


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
