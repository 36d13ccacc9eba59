"""Splitting a batch between the dense and the compressed pass of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
            dimension 0. What is no tensor goes into both parts as it is.
        dense: Share of the batch in the pass at w, above 0 and at most 1.
        compressed: Share of the batch in the passes at w~, above 0 and at most 1.

    Raises:
        ValueError: If a share is out of range, if it leaves a pass without a sample, or if the
            batch has no tensors or tensors of different lengths.
    """
    check_shares(dense, compressed)
    lengths = sorted(set(_lengths(batch)))
    if len(lengths) != 1:
        raise ValueError(
            f"a batch of {type(batch).__name__} cannot be split: it must hold tensors with as many "
            f"samples each, got {lengths or 'no tensors'}"
        )
    first, second = split_rows(lengths[0], dense, compressed)
    return _rows(batch, first), _rows(batch, second)


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


def _lengths(batch: object) -> list[int]:
    """Returns the number of samples of every tensor in a batch."""
    if isinstance(batch, Tensor):
        return [len(batch)] if batch.dim() else []
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if isinstance(batch, (tuple, list)):
        return [length for part in batch for length in _lengths(part)]
    return []


def _rows(batch: Batch, rows: slice) -> Batch:
    """Returns some rows of every tensor in a batch, in a batch of the same type."""
    return map_tensors(batch, lambda tensor: tensor[rows] if tensor.dim() else tensor)


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """Returns a batch of the same type with `function` applied to its tensors.

    Args:
        batch: Tensor, or tuples, lists and mappings of tensors. What is no tensor stays as it is.
        function: Function from tensors to tensors.
    """
    mapped: Any = batch
    if isinstance(batch, Tensor):
        mapped = function(batch)
    elif isinstance(batch, Mapping):
        mapped = {key: map_tensors(value, function) for key, value in batch.items()}
        if type(batch) is not dict:
            mapped = type(batch)(mapped)  # type: ignore[call-arg]
    elif isinstance(batch, (tuple, list)):
        parts = [map_tensors(part, function) for part in batch]
        mapped = type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return mapped  # type: ignore[no-any-return]
