"""Positions of stored values: a bit mask, or indices within the groups of an N:M pattern."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from torchcram.artifact.integers import (
    CHUNK,
    as_integers,
    look_up,
    pack,
    packed_size,
    unpack,
    unpack_some,
)
from torchcram.kernels.cpu.decode import count_ones, expand_

Array = npt.NDArray[np.bool_]


def index_width(group: int) -> int:
    """Returns the number of bits of an index within a group."""
    return max(1, (group - 1).bit_length())


def write_mask(kept: Tensor) -> Tensor:
    """Packs flat booleans into bits."""
    return pack(kept.view(torch.uint8), 1)


def count_kept(bits: Tensor, numel: int) -> int:
    """Returns the number of positions that a mask keeps.

    Raises:
        ValueError: If bits after its end are set.
    """
    require_end(bits, numel)
    count = count_ones(bits, numel)
    return int(_ONES.index_select(0, bits.int()).sum()) if count is None else count


def require_end(bits: Tensor, numel: int) -> None:
    """Raises ValueError if bits after the end of a mask are set."""
    spare = 8 * len(bits) - numel
    if spare and int(bits[-1]) >> (8 - spare):
        raise ValueError("its mask has bits set after its end")


_ONES = torch.tensor([number.bit_count() for number in range(256)], dtype=torch.uint8)


@dataclass(frozen=True)
class Values:
    """Stored values that are read some at a time.

    Attributes:
        count: Number of values.
        read: Function that returns the values of a slice.
    """

    count: int
    read: Callable[[slice], Tensor]


def place_by_mask_(out: Tensor, bits: Tensor, values: Values) -> Tensor:
    """Fills a flat tensor with `values` where the mask is set, and with zeros elsewhere.

    Raises:
        ValueError: If there are more or fewer values than bits set.
    """
    used = 0
    for start in range(0, len(out), CHUNK):
        into = out[start : start + CHUNK]
        some = bits[start // 8 : packed_size(start + len(into), 1)]
        after = used + count_kept(some, len(into))
        if after > values.count:
            raise ValueError(f"it has only {values.count} values for its places")
        _place(into, some, values.read(slice(used, after)))
        used = after
    if used != values.count:
        raise ValueError(f"it has {values.count} values for {used} places")
    return out


def _place(into: Tensor, bits: Tensor, values: Tensor) -> None:
    """Fills a tensor with values where bits are set, and with zeros elsewhere.

    If more than a tenth of the booleans are True, numpy searches them without a branch. The ones
    that are appended ensure that.
    """
    if expand_(into, bits, values):
        return
    kept = np.unpackbits(bits.numpy(), count=len(into), bitorder="little").view(np.bool_)
    ones = len(kept) // 8 + 1
    _put(into, np.flatnonzero(np.concatenate((kept, np.ones(ones, np.bool_))))[:-ones], values)


def fill_up(kept: Tensor, keep: int, group: int) -> Tensor:
    """Returns `kept` with further positions set, so that every group keeps exactly `keep`."""
    kept = kept.view(-1, group)
    missing = keep - kept.sum(1, dtype=torch.int16)  # (groups,)
    dropped = kept.logical_not()
    rank = dropped.cumsum(1, dtype=torch.int16)
    return (kept | (dropped & (rank <= missing.unsqueeze(1)))).flatten()


def most_kept(kept: Tensor, group: int) -> int:
    """Returns the largest number of positions that a group keeps."""
    return int(kept.view(-1, group).sum(1, dtype=torch.int16).max())


def write_indices(kept: Tensor, group: int) -> Tensor:
    """Returns the indices of kept positions within their groups, packed."""
    places = kept.nonzero().squeeze(1).remainder_(group)
    return pack(places.to(torch.uint8), index_width(group))


def place_by_indices_(
    out: Tensor, indices: Tensor, values: Values, *, pattern: tuple[int, int]
) -> Tensor:
    """Fills `keep` of every `group` positions of a flat tensor, and the others with zeros.

    Raises:
        ValueError: If an index is outside its group.
    """
    keep, group = pattern
    width = index_width(group)
    step = max(1, CHUNK // group // 8) * 8  # groups at a time, whole bytes of indices
    groups = len(out) // group
    starts = torch.arange(min(step, groups) * keep).div_(keep, rounding_mode="floor").mul_(group)
    masks = _masks_of_indices(keep, group)
    for first in range(0, groups, step):
        into = out[first * group : (first + step) * group]
        some = slice(first * keep, min(first + step, groups) * keep)
        if masks is not None:
            packed = indices[some.start * width // 8 : packed_size(some.stop, width)]
            if expand_(into, look_up(masks, packed), values.read(some)):
                continue
        places = unpack_some(indices, width, some.start, count=some.stop - some.start)
        _require_places(places, pattern)
        _put(into, places.long().add_(starts[: len(places)]).numpy(), values.read(some))
    return out


def require_indices(indices: Tensor, numel: int, *, pattern: tuple[int, int]) -> None:
    """Raises ValueError unless the indices of every group ascend and are inside it.

    Args:
        indices: Packed indices.
        numel: Number of values in the tensor, a multiple of the group.
        pattern: Pattern as (keep, group).
    """
    keep, group = pattern
    stored = numel // group * keep
    mask = mask_of_indices(indices, pattern=pattern)
    if mask is not None:
        if count_kept(_cut(mask, numel), numel) != stored:
            raise ValueError("the places of a group do not ascend")
        return
    step = max(1, CHUNK // keep // 8) * 8 * keep  # whole groups, whole bytes of indices
    for start in range(0, stored, step):
        count = min(step, stored - start)
        places = unpack_some(indices, index_width(group), start, count=count)
        _require_places(places, pattern)


def _cut(mask: Tensor, numel: int) -> Tensor:
    """Returns the first `numel` bits of a mask, followed by zeros."""
    mask = mask[: packed_size(numel, 1)]
    if numel % 8:
        mask = mask.clone()
        mask[-1] &= (1 << numel % 8) - 1
    return mask


def _require_places(places: Tensor, pattern: tuple[int, int]) -> None:
    keep, group = pattern
    if group < 1 << index_width(group) and int(places.max()) >= group:
        raise ValueError(f"an index is outside its group of {group}")
    if not bool((places.view(-1, keep).int().diff(dim=1) > 0).all()):
        raise ValueError("the places of a group do not ascend")


def mask_of_indices(indices: Tensor, *, pattern: tuple[int, int]) -> Tensor | None:
    """Returns the mask of packed indices, or None if a table of bytes cannot provide it.

    It may have bits after the last group.
    """
    masks = _masks_of_indices(*pattern)
    return None if masks is None else look_up(masks, indices)


@functools.cache
def _masks_of_indices(keep: int, group: int) -> Tensor | None:
    """Returns the mask of every possible byte of indices: (256, bytes).

    None if a byte does not hold a whole number of groups, if their mask is not a whole number of
    bytes, or if indices could be outside their group.
    """
    width = index_width(group)
    groups, rest = divmod(8, keep * width)
    if rest or groups * group % 8 or group != 1 << width:
        return None
    places = unpack(torch.arange(256).to(torch.uint8), width, 256 * groups * keep)
    starts = torch.arange(groups).mul(group).repeat_interleave(keep)
    kept = torch.zeros(256, groups * group, dtype=torch.uint8)
    kept.scatter_(1, places.view(256, -1) + starts, 1)
    ascending = (places.view(256, groups, keep).int().diff(dim=2) > 0).all(2)
    # groups that do not ascend have no bit set, which is too few for their values
    kept.view(256, groups, group).mul_(ascending.unsqueeze(2))
    return pack(kept.flatten(), 1).view(256, -1)


def _put(into: Tensor, places: npt.NDArray[np.int64], values: Tensor) -> None:
    """Writes values at some positions and zeros elsewhere, as integers: numpy lacks some types."""
    into.zero_()
    as_integers(into).numpy()[places] = as_integers(values).numpy()
