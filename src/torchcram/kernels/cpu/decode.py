"""Reading artifact files: stored values back to tensors, and checksums."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from torchcram.kernels.cpu.library import find


def expand_(out: Tensor, bits: Tensor, values: Tensor) -> bool:
    """Fills `out` with the next of `values` where a bit is set, and with zeros elsewhere.

    Args:
        out: Flat, contiguous tensor on the CPU to write to.
        bits: Mask as uint8, with at least one bit for each position, lowest first.
        values: Values of the dtype of `out`.

    Returns:
        Whether the work was done; False, with `out` unchanged, without a compiled library.

    Raises:
        ValueError: If the number of values is not the number of bits that are set.
    """
    library = find()
    if library is None or out.itemsize not in (1, 2, 4, 8):
        return False
    bits, values, size = bits.contiguous(), values.contiguous(), out.itemsize
    if 8 * len(bits) < len(out) or values.dtype != out.dtype or not out.is_contiguous():
        raise ValueError("mask, values and output do not match in size or dtype")
    used = library.torchcram_expand(
        bits.data_ptr(), len(out), values.data_ptr(), len(values), size, out.data_ptr()
    )
    if used != len(values):
        raise ValueError(
            f"the mask does not keep as many positions as there are values, {len(values)}"
        )
    return True


def count_ones(bits: Tensor, places: int) -> int | None:
    """Returns the number of bits that are set in a mask, or None without a compiled library.

    Args:
        bits: Mask as uint8, lowest bit first.
        places: Number of bits to count, from the first on.

    Raises:
        ValueError: If the mask is too short or not uint8.
    """
    library = find()
    if library is None:
        return None
    if 8 * len(bits) < places or bits.dtype != torch.uint8:
        raise ValueError(
            f"a mask must be uint8 with at least {places} bits, got {len(bits)} x {bits.dtype}"
        )
    return int(library.torchcram_count_ones(bits.contiguous().data_ptr(), places))


def rows_of_table(table: Tensor, numbers: Tensor) -> Tensor | None:
    """Looks bytes up in a table; returns None without a compiled library.

    Args:
        table: Table of 256 rows.
        numbers: Row numbers as uint8.

    Returns:
        Bytes of the chosen rows, one row after another.

    Raises:
        ValueError: If the table has another number of rows, or the numbers are not uint8.
    """
    library = find()
    if library is None:
        return None
    table, numbers = table.contiguous(), numbers.contiguous()
    wide = table.shape[1] * table.itemsize
    if len(table) != 256 or numbers.dtype != torch.uint8:
        raise ValueError(
            f"a table must have 256 rows and uint8 numbers, got {len(table)} and {numbers.dtype}"
        )
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
    """Expands stored values by a mask and multiplies them by their scales.

    Args:
        out: Flat, contiguous float32 tensor on the CPU to write to.
        mask: Mask as uint8, with at least one bit for each position, lowest first; None if every
            position has a value.
        values: Values as float32, or packed integers as uint8.
        stored: Number of values.
        bits: Number of bits of an integer; 0 for float32.
        scales: Scales as float32, each for the same number of consecutive positions; or None.

    Returns:
        Number of values used, or -1 if there are too few; None without a compiled library.

    Raises:
        ValueError: If the tensors do not match in size or dtype.
    """
    library = find()
    if library is None:
        return None
    kind = torch.uint8 if bits else torch.float32
    flat = all(tensor is None or tensor.dim() == 1 for tensor in (out, mask, values, scales))
    if not flat or not out.is_contiguous() or not 0 <= bits <= 8 or bits == 1:
        raise ValueError("mask, values, scales and output do not match in size or dtype")
    enough = 8 * values.numel() * values.itemsize >= stored * (bits or 32)
    enough = enough and (mask is None or (mask.dtype == torch.uint8 and 8 * len(mask) >= len(out)))
    scaled = scales is None or (
        scales.dtype == torch.float32 and len(scales) > 0 and len(out) % len(scales) == 0
    )
    if not (enough and scaled and values.dtype == kind and out.dtype == torch.float32):
        raise ValueError("mask, values, scales and output do not match in size or dtype")
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
    """Returns the same CRC-32 as `zlib.crc32`.

    Args:
        data: Bytes as a flat uint8 tensor on the CPU.
        seen: Checksum of the bytes before them.

    Raises:
        ValueError: If the data is not uint8.
    """
    library = find()
    if data.dtype != torch.uint8:
        raise ValueError(f"checksums are of bytes, not of {data.dtype}")
    data = data.contiguous()
    if library is None:
        return zlib.crc32(data.numpy().data, seen)
    return int(library.torchcram_crc32(data.data_ptr(), data.numel(), seen))
