"""Comparing the outputs of two versions of a model, such as a dense and a prepared one."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorError(NamedTuple):
    """How far a tensor is from the expected one.

    Attributes:
        error: Largest absolute difference. Infinity where the shapes differ, where a value that is
            infinite or NaN differs, or where integers or booleans differ.
        largest: Largest finite magnitude of the expected tensor; 0 if there is none.
    """

    error: float
    largest: float

    @property
    def relative(self) -> float:
        """Largest difference as a fraction of the largest finite magnitude."""
        return self.error / max(self.largest, 1e-30)


def tensor_error(expected: Tensor, actual: Tensor) -> TensorError:
    """Compares two tensors by their values; dtypes and devices may differ.

    Args:
        expected: Output of the reference.
        actual: Output to compare with it.
    """
    exact = not expected.is_floating_point()
    wide = torch.promote_types(expected.dtype, actual.dtype if exact else torch.float32)
    expected, actual = expected.detach().to(wide), actual.detach().to(expected.device, wide)
    finite = expected.isfinite()
    largest = 0.0 if exact or not bool(finite.any()) else float(expected[finite].abs().max())
    if actual.shape != expected.shape:
        return TensorError(torch.inf, largest)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    if bool(same.all()):
        return TensorError(0.0, largest)
    if exact:
        return TensorError(torch.inf, largest)
    error = torch.where(same, 0, actual - expected).abs()
    return TensorError(float(error.nan_to_num(nan=torch.inf, posinf=torch.inf).max()), largest)


def outputs_close(expected: object, actual: object, tolerance: float) -> bool:
    """Returns whether two outputs of a model agree. Objects of unknown types never do.

    Args:
        expected: Output of the reference: a tensor, or lists, tuples, mappings, dataclasses and
            caches of Transformers that hold tensors and plain values.
        actual: Output to compare with it.
        tolerance: Allowed difference of finite numbers, as a fraction of the largest magnitude in
            the expected tensor. Everything else must be equal, types of tensors included.
    """
    try:
        pairs = list(_pairs(expected, actual))
    except ValueError:
        return False
    return all(a.dtype == b.dtype and _tensors_close(a, b, tolerance) for a, b in pairs)


def output_error(expected: object, actual: object) -> float:
    """Returns the largest difference of two outputs of a model relative to the largest value.

    Args:
        expected: Output of the reference, as for `outputs_close`; its dtypes may be others.
        actual: Output to compare with it.

    Returns:
        The largest relative error of a tensor; infinity if something else differs.
    """
    try:
        pairs = list(_pairs(expected, actual))
    except ValueError:
        return torch.inf
    return max((tensor_error(a, b).relative for a, b in pairs), default=0.0)


def _pairs(expected: object, actual: object) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the tensors of two outputs that belong together.

    Raises:
        ValueError: If anything else differs, or is of an unknown type.
    """
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        yield expected, actual
        return
    if type(expected) is not type(actual):
        raise ValueError(f"{type(expected)} is not {type(actual)}")
    children, others = _children(expected), _children(actual)
    if children is None or others is None:
        if expected is not None and not (_is_value(expected) and expected == actual):
            raise ValueError(f"{expected!r} and {actual!r} differ, or cannot be compared")
        return
    if children.keys() != others.keys():
        raise ValueError(f"{list(children)} and {list(others)} differ")
    for key, child in children.items():
        yield from _pairs(child, others[key])


def _is_value(output: object) -> bool:
    return isinstance(output, (bool, int, float, str))


def _children(output: Any) -> dict[Any, Any] | None:  # noqa: ANN401
    """Returns the parts of an output by name or number; None if it has none."""
    if dataclasses.is_dataclass(output):
        return vars(output)
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, (list, tuple)):
        return dict(enumerate(output))
    layers = getattr(output, "layers", None)
    if type(output).__name__.endswith("Cache") and isinstance(layers, list):  # of Transformers
        tensors = [(getattr(x, "keys", None), getattr(x, "values", None)) for x in layers]
        return dict(enumerate(tensors))
    return None


def _tensors_close(expected: Tensor, actual: Tensor, tolerance: float) -> bool:
    error, largest = tensor_error(expected, actual)
    return error <= tolerance * largest + 1e-12
