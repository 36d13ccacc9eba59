"""Sparse Linear layers against float64: every remainder of a tile, every instruction set."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_weight
from torch.nn import functional

from torchcram.runtime.cpu.modules import SparseFeedForward, SparseLinear
from torchcram.runtime.cpu.packing import PAIRS, QUAD_ROWS, check_packed, pack_linear

pytestmark = needs_kernels

LAYOUTS = [PAIRS, QUAD_ROWS]
NAN, INF = float("nan"), float("inf")
ACTIVATIONS = [
    ("relu", functional.relu),
    ("gelu", functional.gelu),
    ("gelu_tanh", lambda x: functional.gelu(x, approximate="tanh")),
    ("silu", functional.silu),
]


def sparse_linear(x, weight, bias=None, residual=None, *, layout=None, activation="none"):
    packed = pack_linear(weight, layout=layout)
    check_packed(packed)
    return torch.ops.torchcram.sparse_linear(x, packed, bias, residual, weight.shape[0], activation)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [*range(1, 18), 31, 33, 47, 48, 63, 64, 65, 129])
@pytest.mark.usefixtures("each_level")
def test_every_remainder_of_tokens(layout, tokens):
    x, weight, bias = torch.randn(tokens, 37), sparse_weight(21, 37), torch.randn(21)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert relative_error(sparse_linear(x, weight, bias, layout=layout), expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [*range(1, 18), 63, 65, 384, 385, 400, 769])
@pytest.mark.usefixtures("each_level")
def test_every_remainder_of_rows(layout, rows):
    x, weight, bias = torch.randn(19, 33), sparse_weight(rows, 33), torch.randn(rows)
    expected = functional.linear(x.double(), weight.double(), bias.double())
    assert relative_error(sparse_linear(x, weight, bias, layout=layout), expected) < 1e-6


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inner", [1, 2, 15, 16, 17, 159, 160, 161, 175, 320, 333])
@pytest.mark.usefixtures("each_level")
def test_every_remainder_of_columns(layout, inner):
    x, weight = torch.randn(20, inner), sparse_weight(18, inner)
    expected = functional.linear(x.double(), weight.double())
    assert relative_error(sparse_linear(x, weight, layout=layout), expected) < 2e-6


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 400), st.floats(0, 1), st.booleans())
def test_any_shape_and_sparsity(tokens, rows, inner, sparsity, pairs):
    x, weight = torch.randn(tokens, inner), sparse_weight(rows, inner, sparsity=sparsity)
    expected = functional.linear(x.double(), weight.double())
    found = sparse_linear(x, weight, layout=PAIRS if pairs else QUAD_ROWS)
    assert (found - expected).abs().max() <= 1e-5 * max(1.0, expected.abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_empty_rows_columns_and_dense_ones(layout):
    weight = torch.randn(40, 50)
    weight[3], weight[10:20], weight[:, 7] = 0, 0, 0
    x = torch.randn(70, 50)
    expected = functional.linear(x.double(), weight.double())
    assert relative_error(sparse_linear(x, weight, layout=layout), expected) < 1e-6
    nothing = sparse_linear(x, torch.zeros(40, 50), torch.ones(40), layout=layout)
    assert torch.equal(nothing, torch.ones(70, 40))


@pytest.mark.parametrize(("activation", "function"), ACTIVATIONS)
@pytest.mark.usefixtures("each_level")
def test_activations(activation, function):
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([0.0, -0.0, 1e-30, 100, -100])])
    found = sparse_linear(x[:, None], torch.ones(1, 1), activation=activation)
    expected = function(x.double())[:, None]
    assert (found - expected).abs().max() < 2e-6 * 20


@pytest.mark.parametrize(("activation", "function"), ACTIVATIONS)
@pytest.mark.usefixtures("each_level")
def test_activations_of_what_is_no_number_large_or_small(activation, function):
    x = torch.tensor([NAN, INF, 3e38, 1e30, 1e-30, -1e-30, -90.0, -1e30, -3e38])
    found = sparse_linear(x[:, None], torch.ones(1, 1), activation=activation)[:, 0]
    assert found[0].isnan()
    assert found[1] == INF
    torch.testing.assert_close(found[2:].double(), function(x[2:].double()), rtol=1e-6, atol=1e-35)
    least = sparse_linear(torch.tensor([[-INF]]), torch.ones(1, 1), activation=activation)
    assert least == 0  # the limit


@pytest.mark.parametrize("activation", ["none", *(name for name, _ in ACTIVATIONS)])
@pytest.mark.usefixtures("each_level")
def test_a_nan_stays_in_its_token(activation):
    x, one, two = torch.randn(19, 20), torch.randn(33, 20), torch.randn(7, 33)
    x[5, 3] = NAN
    layer = SparseLinear(one, None)
    both = SparseFeedForward(layer, SparseLinear(two, None), activation=activation)
    for found in (sparse_linear(x, one, activation=activation), both(x)):
        assert found[5].isnan().all()
        assert found[torch.arange(19) != 5].isfinite().all()


def reached(x, weight):
    """Where a row uses an input that is not finite."""
    return ((~x.isfinite()).double() @ (weight != 0).double().t()) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.usefixtures("each_level")
def test_what_is_not_finite_reaches_the_rows_that_use_it_alone(layout, bad):
    for rows, inner, sparsity in ((37, 200, 0.5), (22, 129, 0.8), (3, 5, 0.6), (400, 128, 0.9)):
        weight = sparse_weight(rows, inner, sparsity=sparsity)
        weight[rows // 2] = 0  # nothing but what fills up
        x = torch.randn(inner + 1, inner)
        x.diagonal().fill_(bad)  # in each token another column, in the last one none
        found = sparse_linear(x, weight, torch.randn(rows), layout=layout)
        assert torch.equal(~found.isfinite(), reached(x, weight))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.floats(0, 1), st.booleans(), st.data())
def test_any_columns_that_are_not_finite(rows, inner, sparsity, pairs, data):
    weight, x = sparse_weight(rows, inner, sparsity=sparsity), torch.randn(3, inner)
    for column in data.draw(st.lists(st.integers(0, inner - 1), min_size=1, max_size=5)):
        x[1, column] = data.draw(st.sampled_from([NAN, INF]))
    found = sparse_linear(x, weight, layout=PAIRS if pairs else QUAD_ROWS)
    assert torch.equal(~found.isfinite(), reached(x, weight))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("each_level")
def test_what_is_not_finite_between_two_layers(layout):
    one, two, x = sparse_weight(300, 7), sparse_weight(21, 300), torch.randn(5, 7)
    first, second = pack_linear(one, layout=layout), pack_linear(two, layout=layout)
    for column in (
        0,
        1,
        127,
        128,
        129,
        255,
        256,
        299,
    ):  # at the borders of the blocks of the second
        bias = torch.randn(300)
        bias[column] = INF
        found = torch.ops.torchcram.sparse_feed_forward(
            x, first, bias, "none", second, None, None, 21
        )
        assert torch.equal(~found.isfinite(), reached(functional.linear(x, one, bias), two))


def test_the_residual_is_added_after_the_activation():
    x, weight = torch.randn(2, 35, 20), sparse_weight(18, 20)
    residual = torch.randn(2, 35, 18)
    expected = functional.linear(x.double(), weight.double()).relu() + residual
    found = sparse_linear(x, weight, None, residual, activation="relu")
    assert found.shape == (2, 35, 18)
    assert relative_error(found, expected) < 1e-6


def test_inputs_of_any_strides_and_none_at_all():
    weight = sparse_weight(6, 10)
    x = torch.randn(10, 40).t()
    expected = functional.linear(x.double(), weight.double())
    assert relative_error(sparse_linear(x, weight), expected) < 1e-6
    assert sparse_linear(torch.randn(0, 10), weight).shape == (0, 6)
    assert sparse_linear(torch.randn(10), weight).shape == (6,)


@pytest.mark.parametrize("tokens", [1, 17, 64, 200])
@pytest.mark.usefixtures("each_level")
def test_feed_forward_is_both_layers(tokens):
    one, two = sparse_weight(401, 37), sparse_weight(23, 401)
    first, second = SparseLinear(one, torch.randn(401)), SparseLinear(two, torch.randn(23))
    both = SparseFeedForward(first, second, activation="gelu")
    x, residual = torch.randn(tokens, 37), torch.randn(tokens, 23)
    middle = functional.gelu(functional.linear(x.double(), one.double(), first.bias.double()))
    expected = functional.linear(middle, two.double(), second.bias.double()) + residual
    assert relative_error(both(x, residual), expected) < 2e-6


def test_what_does_not_fit_is_refused():
    weight = sparse_weight(6, 10)
    with pytest.raises(ValueError, match="does not map 11 features to 6"):
        sparse_linear(torch.randn(3, 11), weight)
    with pytest.raises(ValueError, match=r"float32, not torch\.float64"):
        sparse_linear(torch.randn(3, 10).double(), weight)
    with pytest.raises(ValueError, match="'tanh' is not one of"):
        SparseLinear(weight, None, activation="tanh")
    layer = SparseLinear(weight, None)
    with pytest.raises(ValueError, match="cannot be followed by"):
        SparseFeedForward(layer, layer, activation="relu")


@pytest.mark.parametrize(
    ("bias", "given"),
    [
        (torch.zeros(1), r"\(1,\) and torch\.float32"),
        (torch.zeros(7), r"\(7,\) and torch\.float32"),
        (torch.zeros(1, 6), r"\(1, 6\) and torch\.float32"),
        (torch.zeros(6).double(), r"\(6,\) and torch\.float64"),
        (torch.zeros(1).expand(6), r"\(6,\) and torch\.float32, not contiguous"),
    ],
)
def test_a_bias_that_does_not_fit_is_refused(bias, given):
    weight, x = sparse_weight(6, 10), torch.randn(3, 10)
    with pytest.raises(ValueError, match=f"^bias is of shape {given}.*6 values.*float32"):
        sparse_linear(x, weight, bias)
    one, two = pack_linear(weight), pack_linear(sparse_weight(6, 6))
    operator = torch.ops.torchcram.sparse_feed_forward
    with pytest.raises(ValueError, match=f"^bias is of shape {given}.*6 values"):
        operator(x, one, bias, "relu", two, None, None, 6)
    with pytest.raises(ValueError, match=f"^then_bias is of shape {given}.*6 values"):
        operator(x, one, None, "relu", two, bias, None, 6)


def test_layers_that_do_not_follow_one_another_are_refused():
    one, two = pack_linear(sparse_weight(64, 10)), pack_linear(sparse_weight(6, 16))
    operator, x = torch.ops.torchcram.sparse_feed_forward, torch.randn(3, 10)
    with pytest.raises(ValueError, match="64 values"):
        operator(x, one, torch.zeros(16), "relu", two, None, None, 6)
    with pytest.raises(ValueError, match="does not map 10 features to 6"):
        operator(x, one, torch.zeros(64), "relu", two, None, None, 6)


def test_other_residuals_activations_and_inputs_are_refused():
    weight, x = sparse_weight(6, 10), torch.randn(3, 10)
    with pytest.raises(ValueError, match=r"residual is of shape \(4, 6\).*\(3, 6\)"):
        sparse_linear(x, weight, None, torch.randn(4, 6))
    with pytest.raises(ValueError, match="activation 'tanh' is not one of"):
        sparse_linear(x, weight, activation="tanh")
    with pytest.raises(ValueError, match="at least one dimension"):
        sparse_linear(torch.tensor(1.0), weight)
