"""Small numbers packed without gaps: number i takes the bits from i * width on, lowest first.

Eight numbers of `width` bits are one integer of 64 bits, and three times half of what is in it
moves: from next to each other to a byte apart, or back.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from torchcram.kernels.cpu.decode import rows_of_table

CHUNK = 1 << 17  # numbers at a time: what they need meanwhile stays in the cache


def packed_size(count: int, width: int) -> int:
    """Returns how many bytes `count` numbers of `width` bits take."""
    return (count * width + 7) // 8


def pack(numbers: Tensor, width: int) -> Tensor:
    """Packs numbers below 2^width; uint8 in, uint8 out."""
    count = numbers.numel()
    packed = torch.empty(packed_size(count, width), dtype=torch.uint8)
    for start in range(0, count, CHUNK):
        some = numbers[start : start + CHUNK]
        eights = torch.zeros((len(some) + 7) // 8 * 8, dtype=torch.uint8)
        eights[: len(some)] = some
        words = eights.view(torch.int64)
        if width < 8:
            for half in (1, 2, 4):
                _halves(words, half * width, 8 * half, together=True)
        into = packed[start // 8 * width : packed_size(start + len(some), width)]
        into.copy_(words.view(torch.uint8).view(-1, 8)[:, :width].reshape(-1)[: len(into)])
    return packed


def unpack(packed: Tensor, width: int, count: int) -> Tensor:
    """Returns the `count` numbers that `pack` has packed."""
    numbers = torch.empty(count, dtype=torch.uint8)
    for start in range(0, count, CHUNK):
        into = numbers[start : start + CHUNK]
        into.copy_(unpack_some(packed, width, start, count=len(into)))
    return numbers


def unpack_some(packed: Tensor, width: int, start: int, *, count: int) -> Tensor:
    """Returns `count` numbers from `start` on, a multiple of 8."""
    if 8 % width == 0:
        some = packed[start * width // 8 : packed_size(start + count, width)]
        return look_up(_numbers_in_bytes(width), some)[:count]
    first, words = start // 8 * width, (count + 7) // 8
    some = packed[first : first + words * width]
    if len(some) < words * width:  # the last word is cut off
        some = torch.cat((some, some.new_zeros(words * width - len(some))))
    eights = torch.zeros(words, 8, dtype=torch.uint8)
    eights[:, :width] = some.view(-1, width)
    eights = eights.view(torch.int64).squeeze(1)
    for half in (4, 2, 1):
        _halves(eights, half * width, 8 * half, together=False)
    return eights.view(torch.uint8)[:count]


def look_up(table: Tensor, packed: Tensor) -> Tensor:
    """Returns the rows of a table that bytes choose, flat: (256, n) in, (bytes * n,) out."""
    rows = rows_of_table(table, packed)
    if rows is not None:
        return rows.view(table.dtype)
    whole = _WHOLE.get(table.shape[1] * table.itemsize)
    if whole is None:
        return table.index_select(0, packed.int()).flatten()
    return table.view(whole).squeeze(1).index_select(0, packed.int()).view(table.dtype)


# a row that is one number is copied much faster
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


@functools.cache
def _numbers_in_bytes(width: int) -> Tensor:
    """The numbers of 1, 2, 4 or 8 bits that every byte holds: (256, numbers)."""
    shifts = torch.arange(0, 8, width)
    numbers = torch.arange(256).unsqueeze(1).bitwise_right_shift(shifts)
    return numbers.bitwise_and_((1 << width) - 1).to(torch.uint8)


def _halves(words: Tensor, near: int, far: int, *, together: bool) -> None:
    """Moves the upper half of every 2 * far bits: from `near` bits above the lower one, or back."""
    low = (1 << near) - 1
    at = far if together else near
    upper = words.bitwise_and(_repeated(low << at, 2 * far))
    if together:
        upper.bitwise_right_shift_(far - near)
    else:
        upper.bitwise_left_shift_(far - near)
    words.bitwise_and_(_repeated(low, 2 * far)).bitwise_or_(upper)


def _repeated(pattern: int, width: int) -> int:
    """Returns a pattern of bits as often as it fits into 64, as a signed number."""
    word = sum(pattern << place for place in range(0, 64, width))
    return word - (1 << 64) if word >> 63 else word
