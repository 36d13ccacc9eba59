"""Derivatives through sparse layers and operators: those of dense layers, or one clear error."""

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import sparse_model, sparse_weight
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.testing import assert_close

from torchcram.kernels.cpu.library import has_int8
from torchcram.runtime import prepare
from torchcram.runtime.cpu.modules import (
    SparseConv2d,
    SparseFeedForward,
    SparseFeedForwardInt8,
    SparseLinear,
    SparseLinearInt8,
)
from torchcram.runtime.cpu.ops import linear
from torchcram.runtime.cpu.packing import Geometry

pytestmark = [
    needs_kernels,  # torch warns of a part of itself when forward mode is first used
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is"),
]

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}
GEOMETRIES = {
    "padded": Geometry((3, 3), padding=(1, 1)),
    "strided": Geometry((3, 2), stride=(2, 3), padding=(2, 1)),
    "dilated": Geometry((1, 3), dilation=(3, 2)),
}


def linear_case(activation="none"):
    weight, bias, function = sparse_weight(6, 10), torch.randn(6), ACTIVATIONS[activation]
    layer = SparseLinear(weight, bias, activation=activation)
    return layer, lambda x: function(functional.linear(x, weight, bias)), torch.randn(3, 10)


def feed_forward_case():
    one, two, bias = sparse_weight(8, 10), sparse_weight(5, 8), torch.randn(5)
    layer = SparseFeedForward(
        SparseLinear(one, None), SparseLinear(two, bias), activation="gelu_tanh"
    )
    middle = ACTIVATIONS["gelu_tanh"]
    return (
        layer,
        lambda x: functional.linear(middle(functional.linear(x, one)), two, bias),
        torch.randn(3, 10),
    )


def conv_case(geometry="padded", *, by_images=False, relu=False):
    shape = GEOMETRIES[geometry]
    weight, bias = sparse_weight(5, 4, *shape.kernel), torch.randn(5)
    layer = SparseConv2d(weight, bias, shape, by_images=by_images, relu=relu)

    def dense(x):
        y = functional.conv2d(x, weight, bias, shape.stride, shape.padding, shape.dilation)
        return functional.relu(y) if relu else y

    return layer, dense, torch.randn(2, 4, 7, 6)


def attention_case():
    def dense(x):
        heads = x.unflatten(2, (2, 16)).transpose(1, 2)
        weights = functional.softmax(heads @ heads.transpose(2, 3) * 0.2, dim=3)
        return (weights @ heads).transpose(1, 2).flatten(2)

    return lambda x: torch.ops.torchcram.attention(x, x, x, 2, 0.2), dense, torch.randn(2, 5, 32)


def norm_case():
    weight = torch.randn(20)

    def dense(x):
        return weight * x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt()

    return lambda x: torch.ops.torchcram.rms_norm(x, weight, 0.1), dense, torch.randn(3, 20)


def gated_case():
    def dense(x):
        return x * x.sigmoid() * x.flip(0)

    return lambda x: torch.ops.torchcram.silu_and_mul(x, x.flip(0)), dense, torch.randn(3, 20)


CASES = {
    **{f"linear-{name}": (linear_case, (name,), {}) for name in ACTIVATIONS},
    "feed-forward": (feed_forward_case, (), {}),
    **{f"conv-{name}": (conv_case, (name,), {}) for name in GEOMETRIES},
    **{f"images-{name}": (conv_case, (name,), {"by_images": True}) for name in GEOMETRIES},
    "conv-relu": (conv_case, (), {"relu": True}),
    "attention": (attention_case, (), {}),
    "rms-norm": (norm_case, (), {}),
    "silu-and-mul": (gated_case, (), {}),
}
SMOOTH = ["linear-gelu_tanh", "linear-silu", "feed-forward", "conv-padded", "attention", "rms-norm"]


@pytest.fixture(params=CASES)
def case(request):
    torch.manual_seed(0)
    make, arguments, options = CASES[request.param]
    return make(*arguments, **options)


@pytest.fixture(params=SMOOTH)
def smooth(request):
    """A case with second derivatives."""
    torch.manual_seed(0)
    make, arguments, options = CASES[request.param]
    return make(*arguments, **options)


def gradient(function, x):
    x = x.clone().requires_grad_()
    y = function(x)
    weights = torch.linspace(-1, 1, y.numel()).view(y.shape)
    (y * weights).sum().backward()
    return x.grad


def test_backward(case):
    sparse, dense, x = case
    assert_close(gradient(sparse, x), gradient(dense, x))
    assert_close(sparse(x), dense(x))


def test_of_an_empty_batch(case):
    sparse, dense, x = case
    assert torch.equal(gradient(sparse, x[:0]), gradient(dense, x[:0]))


def test_torch_func_grad(case):
    sparse, dense, x = case

    def total(function):
        return torch.func.grad(lambda x: function(x).square().sum())(x)

    assert_close(total(sparse), total(dense))


def test_forward_mode(case):
    sparse, dense, x = case
    tangent = torch.randn_like(x)
    found, expected = (torch.func.jvp(each, (x,), (tangent,)) for each in (sparse, dense))
    assert_close(found, expected)
    for mode in (torch.enable_grad(), torch.no_grad()):
        with mode, forward_ad.dual_level():
            dual = forward_ad.unpack_dual(sparse(forward_ad.make_dual(x, tangent)))
            assert_close(dual.tangent, expected[1])


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_jacobians(case):
    sparse, dense, x = case
    x = x[:1]
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        assert_close(transform(sparse)(x), transform(dense)(x))

    def each(function):
        return torch.func.vmap(torch.func.grad(lambda x: function(x[None]).square().sum()))(case[2])

    assert_close(each(sparse), each(dense))


def test_second_derivatives(smooth):
    sparse, dense, x = smooth

    def again(function):
        given = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(function(given).square().sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        return second

    assert_close(again(sparse), again(dense), rtol=1e-4, atol=1e-4)


def test_residual_and_bias():
    x, weight = torch.randn(3, 10), sparse_weight(6, 10)
    residual, bias = torch.randn(6, requires_grad=True), torch.randn(6, requires_grad=True)
    packed = SparseLinear(weight, None).packed
    found = torch.ops.torchcram.sparse_linear(x, packed, bias, residual, 6, "relu")
    expected = functional.relu(functional.linear(x, weight, bias)) + residual
    for y in (found, expected):
        y.square().sum().backward()
        y.grads = bias.grad, residual.grad
        bias.grad = residual.grad = None
    assert_close(found.grads, expected.grads)


@pytest.mark.parametrize("by_images", [False, True])
def test_the_residual_of_a_convolution(by_images):
    layer, dense, x = conv_case(by_images=by_images)
    layer.relu = True
    residual = torch.randn(2, 5, 7, 6)
    found = gradient(lambda residual: layer(x, residual), residual)
    expected = gradient(lambda residual: functional.relu(dense(x) + residual), residual)
    assert_close(found, expected)


def test_kernels_run_where_no_derivative_is_asked_for(monkeypatch):
    layer, _, x = linear_case()
    monkeypatch.setattr(linear, "unpack_linear", None)
    assert not layer(x).requires_grad
    with torch.no_grad():
        assert not layer(x.requires_grad_()).requires_grad
    with torch.inference_mode():
        layer(torch.randn(3, 10))
    with pytest.raises(TypeError):  # and the dense weight is used where one is
        layer(x)


@pytest.mark.skipif(not has_int8(), reason="this machine has no kernels for 8 bits")
@pytest.mark.parametrize("feed_forward", [False, True])
def test_eight_bits_have_none(feed_forward):
    layer = SparseLinearInt8(torch.eye(8), None)
    if feed_forward:
        layer = SparseFeedForwardInt8(
            layer, SparseLinearInt8(torch.eye(8), None), activation="relu"
        )
    x = torch.randn(3, 8)

    def total(x):
        return layer(x).sum()

    for derive in (
        lambda: total(x.clone().requires_grad_()).backward(),
        lambda: torch.func.grad(total)(x),
        lambda: torch.func.jvp(layer, (x,), (x,)),
        lambda: torch.func.jacrev(layer)(x),
        lambda: layer(torch.zeros(0, 8, requires_grad=True)),
    ):
        with pytest.raises(RuntimeError, match="in 8 bits have no derivatives"):
            derive()
    with torch.no_grad():
        assert layer(x.clone().requires_grad_()).shape == (3, 8)


@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("batch", [2, 20])
def test_through_a_prepared_model(batch):
    layers = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten()
    model = sparse_model(nn.Sequential(*layers, nn.Linear(150, 8), nn.GELU(), nn.Linear(8, 2)))
    model.eval()
    x = torch.randn(batch, 3, 5, 5)
    fast = prepare(model, x)
    assert any(isinstance(m, SparseConv2d) for m in fast.modules())
    assert_close(gradient(fast, x), gradient(model, x), rtol=1e-4, atol=1e-5)


def test_a_parameter_before_a_sparse_layer_learns():
    layer, dense, x = linear_case("relu")
    before = nn.Linear(10, 10)
    layer(before(x)).sum().backward()
    found = before.weight.grad.clone()
    before.zero_grad()
    dense(before(x)).sum().backward()
    assert_close(found, before.weight.grad)


def test_compiled(case):
    sparse, dense, x = case
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    assert_close(gradient(compiled, x), gradient(dense, x))
