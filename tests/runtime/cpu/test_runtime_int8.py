"""Sparse Linear layers in 8 bits against exact integers, and in whole models."""

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_weight
from torch import nn
from torch.nn import functional

import torchcram
from torchcram.kernels.cpu import library
from torchcram.runtime import prepare
from torchcram.runtime.cpu.modules import SparseFeedForwardInt8, SparseLinearInt8

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(not library.has_int8(), reason="this machine has no kernels for 8 bits"),
]


def exact(x, weight, bias):
    """What the layer computes, in float64: x and W rounded, the rest exact."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    whole = torch.round(weight / scale.clamp(min=1e-30)).double()
    top = x.abs().amax(1, keepdim=True)
    rounded = torch.round(x * (127 / top)).nan_to_num().double()
    return rounded @ whole.t() * (top.double() / 127) * scale.double().t() + bias.double()


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 33, 63, 64, 65, 130])
@pytest.mark.parametrize("inner", [1, 3, 4, 5, 63, 64, 161, 641])
@pytest.mark.parametrize("rows", [1, 2, 17, 400])
def test_every_remainder(tokens, inner, rows):
    x, weight, bias = torch.randn(tokens, inner), sparse_weight(rows, inner), torch.randn(rows)
    found, expected = SparseLinearInt8(weight, bias)(x), exact(x, weight, bias)
    assert relative_error(found, expected) < 1e-5


def test_tokens_of_zeros_and_large_ones():
    x = torch.stack([torch.zeros(20), torch.full((20,), 1e30), torch.full((20,), 1e-30)])
    weight = sparse_weight(6, 20)
    expected = functional.linear(x.double(), weight.double())
    found = SparseLinearInt8(weight, None)(x)
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 0.02 or not other.any()


@pytest.mark.parametrize("tokens", [1, 17, 64, 200])
@pytest.mark.parametrize("middle", [1, 30, 401])
def test_feed_forward_is_both_layers(tokens, middle):
    first = SparseLinearInt8(sparse_weight(middle, 37, sparsity=0.5), torch.randn(middle))
    second = SparseLinearInt8(sparse_weight(23, middle), torch.randn(23))
    both = SparseFeedForwardInt8(first, second, activation="gelu")
    x, residual = torch.randn(tokens, 37), torch.randn(tokens, 23)
    # A value between two steps may be rounded up by one and down by the other.
    expected = second(functional.gelu(first(x)), residual)
    assert relative_error(both(x, residual), expected) < 0.02
    assert (both(x, residual) - expected).abs().median() < 1e-5
    with pytest.raises(ValueError, match="cannot be followed by"):
        SparseFeedForwardInt8(first, first, activation="gelu")


def test_weights_of_8_bits_are_not_rounded_again():
    model = nn.Sequential(nn.Linear(64, 32, bias=False))
    torchcram.compress_(model, "uniform:0.8+int8")
    layer = SparseLinearInt8(model[0].weight, None)
    x = torch.randint(-127, 128, (40, 64)).float()
    x[:, 0] = 127  # whole numbers that 8 bits hold: nothing is lost
    assert relative_error(layer(x), model(x)) < 1e-6


def test_activation_residual_and_state():
    weight = sparse_weight(12, 20)
    layer, x, residual = (
        SparseLinearInt8(weight, None, activation="relu"),
        torch.randn(5, 20),
        torch.randn(5, 12),
    )
    expected = exact(x, weight, torch.zeros(12)).relu() + residual
    assert relative_error(layer(x, residual), expected) < 1e-5
    other = SparseLinearInt8(sparse_weight(12, 20), None, activation="relu")
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other(x), layer(x))
    arguments = (x, layer.packed, layer.start, layer.scales, None, residual, 12, "relu")
    checks = ("test_schema", "test_faketensor")
    operator = torch.ops.torchcram.sparse_linear_int8.default
    torch.library.opcheck(operator, arguments, test_utils=checks)


def test_what_does_not_fit_is_refused():
    layer = SparseLinearInt8(sparse_weight(6, 10), None)
    with pytest.raises(ValueError, match="does not map 13 features to 6"):
        layer(torch.randn(3, 13))
    with pytest.raises(ValueError, match="'tanh' is not one of"):
        SparseLinearInt8(sparse_weight(6, 10), None, activation="tanh")


@pytest.mark.parametrize("inner", [1, 15, 16, 40])
def test_a_nan_stays_in_its_token(inner):
    x, weight = torch.randn(19, inner), torch.randn(7, inner)
    x[5, inner - 1], x[9, inner // 2] = float("nan"), float("inf")
    first, second = SparseLinearInt8(weight, torch.randn(7)), SparseLinearInt8(torch.eye(7), None)
    others = (torch.arange(19) != 5) & (torch.arange(19) != 9)
    for layer in (first, SparseFeedForwardInt8(first, second, activation="relu")):
        found = layer(x)
        assert found[5].isnan().all()
        assert not found[9].isfinite().any()
        assert found[others].isfinite().all()


def test_a_nan_between_two_layers_stays_in_its_token():
    first, second = SparseLinearInt8(torch.eye(4), None), SparseLinearInt8(torch.eye(4), None)
    both = SparseFeedForwardInt8(first, second, activation="none")
    first.bias = torch.tensor([0.0, float("nan"), 0.0, 0.0])
    assert both(torch.randn(3, 4)).isnan().all()
    first.bias = None
    x = torch.randn(3, 4)
    x[1] = 3e38  # 127 steps times a scale that is rounded up: infinite
    first.scales = first.scales * 1.5
    found = both(x)
    assert not found[1].isfinite().any()
    assert found[::2].isfinite().all()


@pytest.mark.parametrize("feed_forward", [False, True])
@pytest.mark.parametrize("name", ["start", "scales", "bias"])
def test_parts_of_a_layer_that_do_not_fit_are_refused(feed_forward, name):
    first = SparseLinearInt8(sparse_weight(6, 10), torch.zeros(6))
    second = SparseLinearInt8(sparse_weight(5, 6), torch.zeros(5))
    x = torch.randn(3, 10)
    for layer, prefix in ((first, ""), (second, "then_"))[: 1 + feed_forward]:
        good, rows = getattr(layer, name), layer.out_features
        both = SparseFeedForwardInt8(first, second, activation="relu") if feed_forward else layer
        for bad in (good[:-1], good.double(), good[:1].expand(rows)):
            setattr(layer, name, bad)
            with pytest.raises(ValueError, match=f"^{prefix}{name} is of shape .* {rows} values"):
                both(x)
        setattr(layer, name, good)
        assert both(x).isfinite().all()


@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("example", [None, torch.randn(40, 32)])
def test_prepare_uses_it_where_it_is_allowed(example):
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))
    torchcram.compress_(model, "uniform:0.8")
    fast, x = prepare(model, example, int8=True), torch.randn(50, 32)
    assert sum(isinstance(m, SparseLinearInt8) for m in fast.modules()) == 2
    assert 1e-5 < relative_error(fast(x), model(x)) < 0.05
    assert not any(isinstance(m, SparseLinearInt8) for m in prepare(model, example).modules())
