import pytest
import torch

from torchcram.runtime.onnx.export import compare


def test_the_same_is_the_same():
    x = torch.tensor([1.0, -torch.inf, torch.nan])
    assert compare(x, x.clone()) is None
    assert compare(torch.tensor([2, 3]), torch.tensor([2, 3])) is None
    assert compare(torch.empty(0), torch.empty(0)) is None


def test_rounding_is_allowed_relative_to_the_largest():
    x = torch.tensor([1000.0, 0.0, torch.inf])
    assert compare(x, x + torch.tensor([0.0, 0.05, 0.0])) is None
    assert "by 0.2 where 0.1" in compare(x, x + torch.tensor([0.0, 0.2, 0.0]))


@pytest.mark.parametrize(
    "other",
    [
        torch.tensor([1.0, torch.inf]),
        torch.tensor([1.0, torch.nan]),
        torch.tensor([1.0]),
        torch.tensor([1.0, 2.0]).double(),
    ],
)
def test_places_shapes_and_types_are_compared(other):
    assert compare(torch.tensor([1.0, 2.0]), other) is not None


def test_infinities_are_not_forgiven():
    x = torch.tensor([-torch.inf, 1.0])
    assert compare(x, torch.tensor([0.0, 1.0])) is not None
    assert compare(x, torch.tensor([torch.inf, 1.0])) is not None
    assert compare(torch.tensor([torch.inf]), torch.tensor([1.0])) is not None


def test_integers_are_to_be_equal():
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3])) == "1 of 2 values"
