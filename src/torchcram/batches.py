"""Splitting a batch between the dense and the compressed pass of a step."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, MutableMapping
from fractions import Fraction
from typing import Any, TypeVar

from torch import Tensor

Batch = TypeVar("Batch")


def split_batch(batch: Batch, dense: float = 0.5, compressed: float = 0.5) -> tuple[Batch, Batch]:
    """Splits a batch between the passes of a step; returns that at w and that at w~.

    The dense pass takes the first samples of the batch, the compressed pass the last ones. With
    the shares 0.5 and 0.5 a step of CrAM+ costs as much as a plain step, with 1 and 0.5 one and a
    half times as much; shares that add up to more than 1 overlap::

        first, second = split_batch((x, y))
        optimizer.zero_grad()
        loss_of(model, first).backward()
        with optimizer.compressed():
            loss_of(model, second).backward()
        optimizer.step()

    Args:
        batch: Tensor, or tuples, lists and mappings of tensors, all of them with the samples in
            dimension 0. Lists and tuples without tensors, such as a list of strings, are split if
            they have an entry per sample. Everything else goes into both parts as it is.
        dense: Share of the batch in the pass at w, above 0 and at most 1.
        compressed: Share of the batch in the passes at w~, above 0 and at most 1.

    Raises:
        ValueError: If a share is out of range, if it leaves a pass without a sample, or if the
            batch has no tensors or tensors of different lengths.
    """
    check_shares(dense, compressed)
    count = _count_samples(batch)
    first, second = split_rows(count, dense, compressed)
    return _rows(batch, first, count), _rows(batch, second, count)


def split_unless_short(batch: Batch, dense: float, compressed: float) -> tuple[Batch, Batch]:
    """Splits a batch as `split_batch` does, unless it has too few samples for its shares.

    Such a batch, often the last one of an epoch, goes into both parts as a whole.

    Raises:
        ValueError: If a share is out of range, or if the batch has no tensors or tensors of
            different lengths.
    """
    check_shares(dense, compressed)
    count = _count_samples(batch)
    try:
        first, second = split_rows(count, dense, compressed)
    except ValueError:
        first = second = slice(0, count)
    return _rows(batch, first, count), _rows(batch, second, count)


def micro_batches(batch: Batch, count: int) -> list[Batch]:
    """Divides a batch into micro-batches, whose sizes differ by one sample at most.

    Args:
        batch: Batch as `split_batch` takes it.
        count: Number of micro-batches; a batch with fewer samples is divided into single ones.

    Raises:
        ValueError: If the count is below 1, or if the batch has no tensors or tensors of different
            lengths.
    """
    if count < 1:
        raise ValueError(f"the number of micro-batches must be at least 1, got {count!r}")
    if count == 1:
        return [batch]
    samples = _count_samples(batch)
    count = max(1, min(count, samples))
    bounds = [samples * number // count for number in range(count + 1)]
    return [_rows(batch, slice(*pair), samples) for pair in itertools.pairwise(bounds)]


def split_rows(count: int, dense: float, compressed: float) -> tuple[slice, slice]:
    """Returns the rows of a batch of `count` samples that the passes at w and at w~ take.

    Raises:
        ValueError: If a pass would have no sample.
    """
    check_shares(dense, compressed)
    end = _nearest(dense, count)
    begin = count - _nearest(compressed, count)
    if math.isclose(dense + compressed, 1):
        begin = end  # every sample is in one pass
    if not 0 < end <= count or not 0 <= begin < count:
        raise ValueError(
            f"shares of {dense} and {compressed} leave a pass without a sample in a batch of "
            f"{count}; allowed: larger shares or larger batches"
        )
    return slice(0, end), slice(begin, count)


def _nearest(share: float, count: int) -> int:
    """Returns `share` of `count` as a whole number; exactly, also beyond the floats' 2^53."""
    return math.floor(Fraction(str(share)) * count + Fraction(1, 2))


def check_shares(dense: float, compressed: float) -> None:
    """Raises ValueError unless both shares are above 0 and at most 1."""
    for name, share in (("dense", dense), ("compressed", compressed)):
        if not 0 < share <= 1:
            raise ValueError(f"the {name} share must be above 0 and at most 1, got {share!r}")


def _count_samples(batch: object) -> int:
    """Returns the number of samples in a batch.

    Raises:
        ValueError: If the batch has no tensors or tensors of different lengths.
    """
    lengths = sorted(set(_lengths(batch)))
    if len(lengths) == 1:
        return lengths[0]
    summary = str(lengths or "no tensors")
    if lengths and isinstance(batch, Mapping):
        by_key = {key: sorted(set(_lengths(value))) for key, value in batch.items()}
        listed = (f"{key}: {', '.join(map(str, own))}" for key, own in by_key.items() if own)
        summary += f" ({'; '.join(listed)})"
    raise ValueError(
        f"a batch of {type(batch).__name__} cannot be split: it must hold tensors with as many "
        f"samples each, got {summary}"
    )


def _lengths(batch: object) -> list[int]:
    """Returns the number of samples of every tensor in a batch."""
    if isinstance(batch, Tensor):
        return [len(batch)] if batch.dim() else []
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return [length for part in batch for length in _lengths(part)]
    return []


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Returns a batch of the same type with `function` applied to its tensors.

    Args:
        batch: Tensor, or tuples, lists and mappings of tensors. What is no tensor stays as it is.
        function: Function from tensors to tensors.
    """
    mapped: Any = batch
    if isinstance(batch, Tensor):
        mapped = function(batch)
    else:
        mapped = _rebuild(batch, lambda part: map_tensors(part, function))
    return mapped  # type: ignore[no-any-return]


def _rows(batch: Any, rows: slice, count: int) -> Any:  # noqa: ANN401
    """Returns some rows of a batch of `count` samples, in a batch of the same type."""
    if isinstance(batch, Tensor):
        return batch[rows] if batch.dim() else batch
    if type(batch) in (tuple, list) and len(batch) == count and not _has_tensors(batch):
        return batch[rows]  # an entry per sample
    return _rebuild(batch, lambda part: _rows(part, rows, count))


def _rebuild(batch: Any, each: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Applies `each` to the members of a mapping, list or tuple; returns one of the same type."""
    if isinstance(batch, Mapping):
        by_key = {key: each(value) for key, value in batch.items()}
        if type(batch) is dict or not isinstance(batch, MutableMapping):
            return by_key
        batch = copy.copy(batch)
        batch.update(by_key)
        return batch
    if isinstance(batch, (tuple, list)):
        parts = [each(part) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch


def _has_tensors(batch: object) -> bool:
    """Returns whether a batch holds tensors, scalars included."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return any(map(_has_tensors, batch))
    return isinstance(batch, Tensor)
