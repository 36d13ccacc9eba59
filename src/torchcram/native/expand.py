"""Values back to the places that a bit mask keeps."""

from __future__ import annotations

from torch import Tensor

from torchcram.native.library import find


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
