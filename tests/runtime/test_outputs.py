"""Outputs of models, compared."""

from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from torchcram.runtime.outputs import output_error, outputs_close, tensor_error


@dataclass
class Output:
    scores: Tensor
    hidden: tuple[Tensor, ...] | None = None


X = torch.tensor([1.0, -8.0, 3.0])
MASKED = torch.tensor([1.0, -torch.inf, 3.0, torch.inf, torch.nan])


def nudged(x):
    return torch.where(x.isfinite(), x * (1 + 1e-7), x)


WRAPPED = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, None),
    "dict": lambda x: {"a": [x]},
    "mapping": lambda x: OrderedDict(a=x, b=True),
    "dataclass": lambda x: Output(X, (x,)),
}
wrapped = pytest.mark.parametrize("wrap", WRAPPED.values(), ids=WRAPPED)


@wrapped
@pytest.mark.parametrize("x", [X, MASKED], ids=["finite", "masked"])
def test_rounding_is_the_same_and_more_is_not(wrap, x):
    assert outputs_close(wrap(x), wrap(nudged(x)), 1e-5)
    assert not outputs_close(wrap(x), wrap(x * 7), 1e-5)
    assert not outputs_close(wrap(x), wrap(x + 0.01), 1e-5)


@pytest.mark.parametrize(
    ("place", "value"), [(1, torch.inf), (1, 0.0), (3, -torch.inf), (4, 0.0), (0, torch.nan)]
)
def test_what_is_not_finite_stays_in_its_place(place, value):
    other = MASKED.clone()
    other[place] = value
    assert not outputs_close(MASKED, other, 1e-5)


@pytest.mark.parametrize(
    "other", [None, X[:2], [X], {"a": X}, Output(X), X.long(), "scores", {"b": X}]
)
def test_other_kinds_are_not_the_same(other):
    assert not outputs_close({"a": X} if isinstance(other, dict) and "b" in other else X, other, 1)


def test_what_cannot_be_compared_is_not_the_same():
    one = object()
    assert not outputs_close(one, one, 1)
    assert outputs_close(None, None, 0)
    assert outputs_close((1, "a"), (1, "a"), 0)
    assert not outputs_close((1, "a"), (2, "a"), 0)
    assert outputs_close(torch.tensor([1, 2]), torch.tensor([1, 2]), 0)
    assert not outputs_close(torch.tensor([1, 2]), torch.tensor([1, 3]), 1)
    assert outputs_close(torch.empty(0), torch.empty(0), 0)


def test_the_error_is_a_fraction_of_the_largest_finite_magnitude():
    error = tensor_error(MASKED, MASKED + torch.tensor([0.0, 0.0, 0.75, 0.0, 0.0]))
    assert error == (0.75, 3.0)
    assert error.relative == 0.25


@pytest.mark.parametrize(
    "other", [X[:2], torch.tensor([torch.inf, -8.0, 3.0]), torch.tensor([torch.nan, -8.0, 3.0])]
)
def test_shapes_and_values_that_are_not_finite_are_infinitely_far(other):
    assert tensor_error(X, other).error == torch.inf


def test_dtypes_and_empty_tensors():
    assert tensor_error(X.bfloat16(), X.double()).error == 0
    assert tensor_error(torch.empty(0), torch.empty(0)) == (0, 0)
    assert tensor_error(torch.tensor([1, 2]), torch.tensor([1, 3])).error == torch.inf
    assert tensor_error(torch.zeros(2), torch.tensor([0.0, 1.0])).relative > 1e20


class Layer:
    def __init__(self, keys):
        self.keys, self.values = keys, None


class DynamicCache:
    def __init__(self, *layers):
        self.layers = list(layers)


def test_caches_are_compared_by_their_tensors():
    cache = DynamicCache(Layer(X), Layer(2 * X))
    assert outputs_close(cache, DynamicCache(Layer(nudged(X)), Layer(2 * X)), 1e-5)
    assert not outputs_close(cache, DynamicCache(Layer(X), Layer(X)), 1e-5)
    assert not outputs_close(cache, DynamicCache(Layer(X)), 1e-5)


def test_the_error_of_outputs_is_that_of_the_worst_tensor():
    assert output_error([X, X], [X, X + X.abs().max() / 4]) == pytest.approx(0.25)
    assert output_error({"a": X.double()}, {"a": X}) == pytest.approx(0, abs=1e-6)
    assert output_error([X], (X,)) == torch.inf
    assert output_error(None, None) == 0
