"""Scores of either sign: their exact order, and the amount that lifts them to a target."""

import pytest
import torch
from torch import nn

from torchcram import compressible_weights
from torchcram.baselines.scores import as_magnitudes, shortfall
from torchcram.operators import NM, GlobalTopK, RowTopK, UniformTopK


def neighbours(dtype):
    """Returns numbers in ascending order, many of them next to one another in the dtype."""
    centres = torch.tensor([-torch.inf, -3.0, -1e-5, 0.0, 1e-5, 1.0, torch.inf], dtype=dtype)
    up, down = (torch.full_like(centres, end) for end in (torch.inf, -torch.inf))
    below, above = torch.nextafter(centres, down), torch.nextafter(centres, up)
    return torch.stack([below, centres, above]).flatten().unique()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_order_of_scores_is_exact(dtype):
    ascending = neighbours(torch.float32).to(dtype).unique()
    order = torch.randperm(len(ascending), generator=torch.Generator().manual_seed(0))
    scores = {"w": ascending[order].unsqueeze(0)}
    magnitudes = as_magnitudes(scores, scores)["w"]
    assert magnitudes.min() > 0
    assert magnitudes.dtype == torch.float64
    assert torch.equal(scores["w"][0, magnitudes[0].argsort()], ascending)
    assert len(magnitudes.unique()) == len(ascending)


def test_the_order_of_float64_is_exact_but_for_the_last_bit():
    ascending = neighbours(torch.float64)[::2]
    scores = {"w": ascending.flip(0).unsqueeze(0)}
    magnitudes = as_magnitudes(scores, scores)
    for keep in range(1, len(ascending)):
        mask = GlobalTopK(1 - keep / len(ascending)).select(magnitudes)["w"][0]
        assert torch.equal(mask, torch.arange(len(ascending)) < keep)


def test_equal_scores_stay_equal_and_zeros_have_no_sign():
    scores = {"w": torch.tensor([[-0.0, 0.0, -1.0, -1.0, torch.nan, torch.inf]])}
    low, same, first, second, unknown, largest = as_magnitudes(scores, scores)["w"][0].tolist()
    assert first == second < low == same < unknown == largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("operator", [GlobalTopK(0.63), UniformTopK(0.4), RowTopK(0.5), NM(2, 4)])
def test_selection_by_signed_scores_is_that_of_shifted_ones(operator, dtype):
    generator = torch.Generator().manual_seed(3)
    draw = {"a": (6, 8), "b": (4, 4, 3, 3)}
    scores = {n: torch.randn(s, generator=generator, dtype=dtype) for n, s in draw.items()}
    expected = operator.select({name: score + 10 for name, score in scores.items()})
    for name, mask in operator.select(as_magnitudes(scores, scores)).items():
        assert torch.equal(mask, expected[name])


def test_layouts_of_the_weights_are_kept():
    model = nn.MultiheadAttention(8, 2)
    weights = compressible_weights(model)
    scores = {name: torch.arange(w.numel()).view(w.shape) - 100.0 for name, w in weights.items()}
    mask = UniformTopK(0.5).select(as_magnitudes(weights, scores))["in_proj_weight"]
    assert mask.view(3, -1).sum(1).tolist() == [32, 32, 32]


def test_scores_rise_together_until_the_largest_pruned_is_zero():
    scores = {"a": torch.tensor([[3.0, -1.0]]), "b": torch.tensor([[-2.0, -5.0]])}
    masks = {"a": torch.tensor([[True, True]]), "b": torch.tensor([[False, False]])}
    amounts = shortfall(GlobalTopK(0.5), scores, scores, masks)
    assert [amount.item() for amount in amounts.values()] == [2.0, 2.0]
    masks = {"a": torch.tensor([[True, False]]), "b": torch.tensor([[True, False]])}
    amounts = shortfall(UniformTopK(0.5), scores, scores, masks)
    assert [amount.item() for amount in amounts.values()] == [1.0, 5.0]
    masks = {"a": torch.tensor([[True, True]]), "b": torch.tensor([[True, True]])}
    amounts = shortfall(GlobalTopK(0.0), scores, scores, masks)
    assert [amount.item() for amount in amounts.values()] == [5.0, 5.0]


def test_scores_that_are_high_enough_do_not_rise():
    scores = {"a": torch.tensor([[3.0, 1.0]]), "b": torch.tensor([[2.0, -5.0]])}
    masks = {"a": torch.tensor([[True, False]]), "b": torch.tensor([[False, False]])}
    amounts = shortfall(GlobalTopK(0.75), scores, scores, masks)
    assert [amount.item() for amount in amounts.values()] == [0.0, 0.0]
