"""Exact selection of the largest magnitudes over many tensors: the only Top-K in the project.

The key of a value is its bit pattern without the sign, an integer that orders as the magnitude does
(infinities above all numbers, NaN above those). The k-th largest key is determined from the highest
bits down: count the keys by their next few bits, see which bin holds the k-th, continue within it.
For many weights a sample first estimates the k-th key, and only keys near the estimate are read
twice. The weights are neither concatenated (except small ones, up to a block) nor sorted, and
tensors share only a short vector of counts, which may be summed over ranks.

Among keys equal to the threshold the first are kept: by tensor order, then by row-major index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torchcram.layers import Weights, part_here
from torchcram.weights import cuda_kernels, zero_unmasked_

WIDTH, NARROW = 11, 8  # bits per level: few levels, or few counts to send to other ranks
SAMPLE = 1 << 16  # keys from which the k-th key is estimated
SMALL = 1 << 20  # elements below which a sample does not pay
BLOCK = 1 << 20  # elements processed at a time, to keep intermediate results small
CUDA_BLOCKS = 16  # blocks processed at once on a GPU, where waiting costs more than memory
_INTEGERS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


class Shards(NamedTuple):
    """Sharding of tensors: every rank holds a contiguous part of each, in the order of the ranks.

    Attributes:
        rank: Rank of this process.
        size: World size.
        add_up: Function that sums a tensor of counts over all ranks, in place.
    """

    rank: int
    size: int
    add_up: Callable[[Tensor], object]


WHOLE = Shards(0, 1, lambda _: None)
"""Sharding of a tensor of which every rank holds all."""


class Threshold(NamedTuple):
    """The k-th largest key, and the number of keys equal to it that are kept."""

    key: int
    ties: int


def count_kept(numel: int, sparsity: float) -> int:
    """Returns the number of `numel` values that are kept at `sparsity`: n - round(sparsity n).

    Raises:
        ValueError: If the sparsity is not in [0, 1].
    """
    if not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must be in [0, 1], got {sparsity!r}")
    return numel - round(sparsity * numel)


def keep_largest_(tensors: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Zeroes all but the `keep` largest magnitudes of all `tensors` together; returns the masks.

    The same as `keep_largest` and `zero_unmasked_`; on CUDA one kernel does both.

    Args:
        tensors: Tensors, as for `keep_largest`, that are not sharded.
        keep: Number of values to keep, between none and all.
    """
    select = _kernel_for(tensors)
    if select is None or not all(map(_has_layout, tensors)):
        masks = keep_largest(tensors, keep)
        zero_unmasked_(tensors, masks)
        return masks
    _check_count(tensors, keep)
    return select(tensors, [keep], (0,) * len(tensors), zero=True)


def keep_largest(
    tensors: Sequence[Tensor], keep: int, *, shards: Shards | Sequence[Shards] | None = None
) -> list[Tensor]:
    """Returns masks that keep exactly the `keep` largest magnitudes of all `tensors` together.

    Args:
        tensors: Tensors of float32, bfloat16, float16 or float64; mixed lists are compared by
            value.
        keep: Number of values to keep, between none and all.
        shards: Sharding, if the tensors are the local parts of whole tensors: the same for all, or
            an entry for each (`WHOLE` for tensors that are not sharded). `keep` then counts values
            of the whole tensors, and the masks are those of the local parts.
    """
    _check_count(tensors, keep, sharded=shards is not None)
    if not tensors:
        return []
    tensors = comparable(tensors)
    if shards is not None:
        each = _for_each(shards, tensors)
        (threshold,) = _by_bits([_by_shards(tensors, each)], [keep], key_bits(tensors))
        return _masks_of_shards(tensors, [threshold] * len(tensors), each, together=True)
    if (select := _kernel_for(tensors)) is not None:
        return select(tensors, [keep], (0,) * len(tensors))
    return _masks(tensors, kth_largest(tensors, keep))


def _check_count(tensors: Sequence[Tensor], keep: int, *, sharded: bool = False) -> None:
    total = sum([tensor.numel() for tensor in tensors])
    if keep < 0 or (not sharded and keep > total):
        raise ValueError(f"cannot keep {keep} of {total} values")


def keep_largest_each(
    tensors: Sequence[Tensor],
    keep: Sequence[int],
    *,
    shards: Shards | Sequence[Shards] | None = None,
) -> list[Tensor]:
    """Returns masks that keep exactly the `keep[i]` largest magnitudes of each `tensors[i]`.

    Args:
        tensors: Tensors, as for `keep_largest`.
        keep: Number of values to keep of each tensor.
        shards: Sharding, as for `keep_largest`.
    """
    for tensor, count in zip(tensors, keep, strict=True):
        if count < 0 or (shards is None and count > tensor.numel()):
            raise ValueError(f"cannot keep {count} of {tensor.numel()} values")
    if shards is not None and tensors:
        tensors, each = comparable(tensors), _for_each(shards, tensors)
        groups = [_by_shards([tensor], [own]) for tensor, own in zip(tensors, each, strict=True)]
        thresholds = _by_bits(groups, keep, key_bits(tensors))
        return _masks_of_shards(tensors, thresholds, each, together=False)
    if (select := _kernel_for(tensors)) is not None:
        return select(tensors, keep, range(len(tensors)))
    return [keep_largest([t], count)[0] for t, count in zip(tensors, keep, strict=True)]


def kth_largest(tensors: Sequence[Tensor], k: int) -> Threshold:
    """Returns the k-th largest key over all `tensors`, which share a dtype."""
    bits = key_bits(tensors)
    if sum(tensor.numel() for tensor in tensors) < SMALL:
        return _by_bits([{WHOLE: Blocks(tensors)}], [k], bits)[0]
    low, high = _guess(tensors, k)
    above, blocks = 0, []
    for keys in Blocks(tensors):
        above += int(torch.count_nonzero(keys > high))
        blocks.append(keys[(keys >= low) & (keys <= high)])
    if above < k <= above + sum(keys.numel() for keys in blocks):
        return _by_bits([{WHOLE: blocks}], [k - above], bits)[0]
    return _by_bits([{WHOLE: Blocks(tensors)}], [k], bits)[0]  # the estimate was off


def keep_largest_in_rows(rows: Tensor, keep: int) -> Tensor:
    """Returns the mask of the `keep` largest magnitudes along the last dimension, exactly."""
    order = magnitude_keys(rows).argsort(dim=-1, descending=True, stable=True)
    mask = torch.zeros_like(rows, dtype=torch.bool)
    return mask.scatter_(-1, order[..., :keep], True)


def shards_of(weights: Weights, names: Iterable[str] | None = None) -> list[Shards] | None:
    """Returns the sharding of local weights; None if none of them is sharded.

    Args:
        weights: All weights.
        names: Names of the weights to look up, possibly repeated; by default all.
    """
    parts = [part_here(weights, name) for name in (weights if names is None else names)]
    if not any(parts):
        return None
    made = {
        part.peers.group: Shards(part.peers.rank, part.peers.size, part.peers.add_up_)
        for part in parts
        if part is not None
    }
    return [WHOLE if part is None else made[part.peers.group] for part in parts]


def _guess(tensors: Sequence[Tensor], k: int) -> tuple[int, int]:
    """Returns an interval that most likely holds the k-th largest key, from a sample of keys."""
    total = sum(tensor.numel() for tensor in tensors)
    step = -(-total // SAMPLE)
    flat = (tensor.detach().reshape(-1)[::step] for tensor in tensors)
    keys = torch.cat([magnitude_keys(part).cpu() for part in flat]).sort(descending=True).values
    rank = k / total * len(keys)
    margin = 5 * (rank * (1 - min(rank / len(keys), 1))) ** 0.5 + 8
    last = torch.iinfo(keys.dtype).max
    high = int(keys[int(rank - margin)]) if rank > margin else last
    low = int(keys[int(rank + margin)]) if rank + margin < len(keys) else 0
    return low, high


def _for_each(shards: Shards | Sequence[Shards], tensors: Sequence[Tensor]) -> Sequence[Shards]:
    return [shards] * len(tensors) if isinstance(shards, Shards) else shards


def _by_shards(
    tensors: Sequence[Tensor], shards: Sequence[Shards]
) -> Mapping[Shards, Iterable[Tensor]]:
    """Returns the keys of `tensors` by their sharding."""
    alike: dict[Shards, list[Tensor]] = {}
    for tensor, own in zip(tensors, shards, strict=True):
        alike.setdefault(own, []).append(tensor)
    return {own: Blocks(some) for own, some in alike.items()}


def _by_bits(
    groups: Sequence[Mapping[Shards, Iterable[Tensor]]], ranks: Sequence[int], bits: int
) -> list[Threshold]:
    """Returns the key at a rank in each group of blocks of keys, a few bits at a time."""
    groups, ranks, prefixes = list(groups), list(ranks), [0] * len(groups)
    distinct = list(dict.fromkeys(shards for group in groups for shards in group))
    width = WIDTH if distinct == [WHOLE] else NARROW
    for top in range(bits, 0, -width):
        low = max(top - width, 0)
        counts = torch.zeros(len(groups), 1 << (top - low), dtype=torch.int64)
        for shards in distinct:
            counts += _count([group.get(shards, ()) for group in groups], shards, top, low)
        at_or_above = counts.flip(1).cumsum(1).flip(1)
        for i, rank in enumerate(ranks):
            # the highest bin with enough keys at or above it
            bin_ = int((at_or_above[i] >= rank).sum()) - 1
            ranks[i] -= int(at_or_above[i, bin_] - counts[i, bin_])
            prefixes[i] = (prefixes[i] << (top - low)) | bin_
            if low:
                groups[i] = {
                    shards: [keys[(keys >> low) == prefixes[i]] for keys in blocks]
                    for shards, blocks in groups[i].items()
                }
    return [Threshold(*pair) for pair in zip(prefixes, ranks, strict=True)]


def _count(groups: Sequence[Iterable[Tensor]], shards: Shards, top: int, low: int) -> Tensor:
    """Counts the keys of each group by their bits from `low` to `top`, over all ranks."""
    bins = 1 << (top - low)
    counts = []
    for blocks in groups:
        each = [torch.bincount((keys >> low) & (bins - 1), minlength=bins) for keys in blocks]
        device = each[0].device if each else None
        zeros = torch.zeros(bins, dtype=torch.int64, device=device)
        counts.append(sum((count.to(device) for count in each), zeros))
    together = torch.stack([count.to(counts[0].device) for count in counts])
    shards.add_up(together)
    return together.cpu()


def _masks(tensors: Sequence[Tensor], threshold: Threshold) -> list[Tensor]:
    """Returns masks of the keys above the threshold and of the first keys that equal it."""
    room, masks = threshold.ties, []
    for run in runs(tensors):
        flat = torch.empty(sum(t.numel() for t in run), dtype=torch.bool, device=run[0].device)
        for block, mask in zip(Blocks(run), flat.split(block_size(run[0])), strict=True):
            torch.gt(block, threshold.key, out=mask)
            tied = block == threshold.key
            if count := int(torch.count_nonzero(tied)):
                mask |= tied if count <= room else tied & (tied.cumsum(0) <= room)
                room -= min(count, room)
        for tensor, part in zip(run, flat.split([t.numel() for t in run]), strict=True):
            mask = part.view(tensor.shape)
            if not tensor.is_contiguous():  # a mask has the strides of its tensor
                mask = torch.empty_like(tensor, dtype=torch.bool).copy_(mask)
            masks.append(mask)
    return masks


def _masks_of_shards(
    tensors: Sequence[Tensor],
    thresholds: Sequence[Threshold],
    shards: Sequence[Shards],
    *,
    together: bool,
) -> list[Tensor]:
    """Returns masks of local parts, in which the first ties of the whole tensors are kept.

    Args:
        tensors: Local parts.
        thresholds: Threshold of each tensor; the same for all if they are ranked `together`.
        shards: Sharding of each tensor.
        together: Whether ties in one tensor come before those in the next.
    """
    ties = [_ties(*pair) for pair in zip(tensors, thresholds, strict=True)]
    here = torch.stack([count.to(ties[0].device) for count in ties]).cpu()
    everywhere = torch.zeros_like(here)
    for alike in dict.fromkeys(shards):
        counts = torch.where(torch.tensor([own == alike for own in shards]), here, 0)
        alike.add_up(counts)
        everywhere += counts
    room = torch.tensor([threshold.ties for threshold in thresholds])
    if together:
        room -= everywhere.cumsum(0) - everywhere
    cut = ((room > 0) & (room < everywhere)).tolist()  # only there does the order of ranks matter
    for alike in dict.fromkeys(shards):
        which = [i for i, own in enumerate(shards) if own == alike and cut[i]]
        by_rank = torch.zeros(alike.size, len(which), dtype=torch.int64)
        by_rank[alike.rank] = here[which]
        if which:
            alike.add_up(by_rank)
        room[which] -= by_rank[: alike.rank].sum(0)
    return [
        _masks([tensor], Threshold(threshold.key, max(int(remaining), 0)))[0]
        for tensor, threshold, remaining in zip(tensors, thresholds, room, strict=True)
    ]


def _ties(tensor: Tensor, threshold: Threshold) -> Tensor:
    """Returns the number of keys that equal the threshold."""
    counts = [torch.count_nonzero(keys == threshold.key) for keys in Blocks([tensor])]
    return torch.stack(counts).sum()


def _kernel_for(tensors: Sequence[Tensor]) -> Callable[..., list[Tensor]] | None:
    """Returns `keep_largest` of the CUDA kernels if it supports `tensors`, otherwise None."""
    kernels = cuda_kernels()
    if kernels is None or not tensors or not tensors[0].is_cuda:
        return None
    dtypes = {tensor.dtype for tensor in tensors}
    devices = {tensor.get_device() for tensor in tensors}  # -1: the CPU
    if len(dtypes) > 1 or len(devices) > 1 or tensors[0].dtype not in kernels.KEYS:
        return None
    select: Callable[..., list[Tensor]] = kernels.keep_largest
    return select if 0 not in [tensor.numel() for tensor in tensors] else None


def _has_layout(tensor: Tensor) -> bool:
    kernels = cuda_kernels()
    return kernels is not None and kernels.layout(tensor) is not None


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
    """Returns the number of bits in a key of these tensors, all of one dtype."""
    return torch.iinfo(_INTEGERS[tensors[0].dtype]).bits - 1


def comparable(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns `tensors` in one dtype, the smallest that represents all their values."""
    dtypes = {tensor.dtype for tensor in tensors}
    for dtype in dtypes:
        _integer(dtype)
    if len(dtypes) == 1:
        return tensors
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    return [tensor.to(wide) for tensor in tensors]


class Blocks:
    """Keys of `tensors`, a block at a time; they can be iterated over repeatedly."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors

    def __iter__(self) -> Iterator[Tensor]:
        for run in runs(self.tensors):
            for block in _flat(run).split(block_size(run[0])):
                yield magnitude_keys(block)


def block_size(tensor: Tensor) -> int:
    """Returns the number of elements to process at a time on the device of `tensor`."""
    return BLOCK * CUDA_BLOCKS if tensor.is_cuda else BLOCK


def runs(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields tensors in order, several small ones at a time: at most a block together."""
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
