"""Comparing the outputs of two versions of a model, such as a dense and a prepared one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

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
        expected: Output of the reference: a tensor, or lists, tuples, mappings and dataclasses that
            hold tensors and plain values.
        actual: Output to compare with it.
        tolerance: Allowed difference of finite numbers, as a fraction of the largest magnitude in
            the expected tensor. Everything else must be equal.
    """
    if isinstance(expected, Tensor):
        return isinstance(actual, Tensor) and _tensors_close(expected, actual, tolerance)
    if type(expected) is not type(actual):
        return False
    if dataclasses.is_dataclass(expected):
        return outputs_close(vars(expected), vars(actual), tolerance)
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        return expected.keys() == actual.keys() and all(
            outputs_close(expected[key], actual[key], tolerance) for key in expected
        )
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        return len(expected) == len(actual) and all(
            outputs_close(a, b, tolerance) for a, b in zip(expected, actual, strict=True)
        )
    if isinstance(expected, (bool, int, float, str)):
        return bool(expected == actual)
    return expected is None


def _tensors_close(expected: Tensor, actual: Tensor, tolerance: float) -> bool:
    if expected.dtype != actual.dtype:
        return False
    error, largest = tensor_error(expected, actual)
    return error <= tolerance * largest + 1e-12
