"""Inputs without elements: layers and operators give what dense gives, or refuse as it does."""

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import sparse_model, sparse_weight
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from torchcram.kernels.cpu.library import has_int8, kernels
from torchcram.runtime import prepare
from torchcram.runtime.cpu.fuse import ResidualNorm, SelfAttention
from torchcram.runtime.cpu.modules import (
    SparseConv2d,
    SparseFeedForward,
    SparseFeedForwardInt8,
    SparseLinear,
    SparseLinearInt8,
)
from torchcram.runtime.cpu.replace_layers import geometry_of

pytestmark = needs_kernels
needs_int8 = pytest.mark.skipif(not has_int8(), reason="this machine has no kernels for 8 bits")

INT8 = [False, pytest.param(True, marks=needs_int8)]
TOKENS = [(0, 10), (3, 0, 10), (0, 0, 10), (2, 10), (10,)]
NO_TOKENS = [(5, 0), (0, 9), (0,), (0, 0), (0, 11)]
CONVOLUTIONS = {
    "1x1": {"kernel_size": 1},
    "padded": {"kernel_size": 3, "padding": 1},
    "strided": {"kernel_size": 3, "stride": 2, "padding": 1},
    "dilated": {"kernel_size": (1, 3), "dilation": (2, 1)},
}
ATTENDED = [(0, 9, 32), (2, 0, 32), (0, 0, 32), (2, 9, 0)]


def check(sparse, dense, shape):
    found, expected = sparse(torch.randn(shape)), dense(torch.randn(shape))
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype


def check_refused(sparse, dense, shape):
    with pytest.raises(RuntimeError):
        dense(torch.randn(shape))
    with pytest.raises(ValueError, match=r"does not map|from \d+ channels|does not fit images"):
        sparse(torch.randn(shape))


@pytest.fixture
def linear():
    return nn.Linear(10, 6)


def sparse_linear(layer, int8):
    return (SparseLinearInt8 if int8 else SparseLinear)(layer.weight, layer.bias)


@pytest.mark.parametrize("int8", INT8)
@pytest.mark.parametrize("shape", TOKENS)
def test_linear(linear, int8, shape):
    check(sparse_linear(linear, int8), linear, shape)


@pytest.mark.parametrize("int8", INT8)
@pytest.mark.parametrize("shape", NO_TOKENS)
def test_linear_of_other_features(linear, int8, shape):
    check_refused(sparse_linear(linear, int8), linear, shape)


@needs_int8
@pytest.mark.parametrize("tokens", [0, 3])
def test_features_that_would_fill_up_four(tokens):
    first, second = SparseLinearInt8(torch.ones(6, 10), None), SparseLinearInt8(torch.eye(6), None)
    both = SparseFeedForwardInt8(first, second, activation="relu")
    for layer in (first, both):
        with pytest.raises(ValueError, match="does not map 12 features to 6, but 10"):
            layer(torch.ones(tokens, 12))


@pytest.mark.parametrize("int8", INT8)
def test_feed_forward(linear, int8):
    second = nn.Linear(6, 3)
    dense = nn.Sequential(linear, nn.GELU(), second)
    kind = SparseFeedForwardInt8 if int8 else SparseFeedForward
    both = kind(sparse_linear(linear, int8), sparse_linear(second, int8), activation="gelu")
    for shape in TOKENS:
        check(both, dense, shape)
    for shape in NO_TOKENS:
        check_refused(both, dense, shape)


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_conv2d(by_images, options):
    layer = nn.Conv2d(3, 8, **options)
    sparse = SparseConv2d(layer.weight, layer.bias, geometry_of(layer), by_images=by_images)
    for shape in ((0, 3, 8, 8), (0, 3, 9, 5), (2, 3, 8, 8), (3, 8, 8)):
        check(sparse, layer, shape)
    for shape in ((0, 4, 8, 8), (2, 0, 8, 8), (0, 0, 8, 8)):
        check_refused(sparse, layer, shape)
    for shape in ((0, 3, 8, 0), (2, 3, 8, 0)):
        if options["kernel_size"] != 3:
            check_refused(sparse, layer, shape)


@pytest.mark.parametrize("shape", ATTENDED)
def test_attention(shape):
    x = torch.randn(shape)
    assert torch.ops.torchcram.attention(x, x, x, 2, 0.5).shape == shape
    heads = x.unflatten(2, (2, shape[2] // 2)).transpose(1, 2)
    dense = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
    assert dense.shape == shape


def test_layers_of_encoders():
    original = nn.Module()
    for name in ("query", "key", "value"):
        original.add_module(name, SparseLinear(sparse_weight(32, 32), None))
    x = torch.randn(0, 9, 32)
    output, _ = SelfAttention(original, 2, 0.25)(x)
    assert output.shape == (0, 9, 32)
    residual = ResidualNorm(SparseLinear(sparse_weight(32, 32), None), nn.LayerNorm(32))
    assert residual(output, x).shape == (0, 9, 32)


def test_a_residual_is_checked_too(linear):
    with pytest.raises(ValueError, match=r"residual is of shape \(5, 6\)"):
        sparse_linear(linear, False)(torch.randn(0, 10), torch.randn(5, 6))


def convolutional():
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, stride=2)
    return sparse_model(nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 5)))


@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("batch", [None, 0, 2, 40])
@pytest.mark.parametrize("fuse", [False, True])
def test_a_prepared_model(batch, fuse):
    model = convolutional()
    fast = prepare(model, None if batch is None else torch.randn(batch, 3, 8, 8), fuse=fuse)
    assert any(isinstance(m, SparseConv2d) for m in fast.modules()) == (batch != 0)
    check(fast, model, (0, 3, 8, 8))


def test_tensors_without_data(linear):
    sparse, conv = sparse_linear(linear, False), nn.Conv2d(3, 8, 3)
    packed = SparseConv2d(conv.weight, conv.bias, geometry_of(conv))
    second = SparseLinear(sparse_weight(4, 6), None)
    both = SparseFeedForward(sparse, second, activation="relu")
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert sparse(torch.empty(0, 10)).shape == (0, 6)
        assert packed(torch.empty(0, 3, 8, 8)).shape == (0, 8, 6, 6)
        assert both(torch.empty(0, 10)).shape == (0, 4)
        x = torch.empty(0, 9, 32)
        assert torch.ops.torchcram.attention(x, x, x, 2, 0.5).shape == x.shape


@pytest.mark.usefixtures("sparse_wins")
def test_a_compiled_model():
    model = convolutional()
    with torch.no_grad():
        compiled = torch.compile(prepare(model), fullgraph=True, backend="aot_eager")
        for batch in (0, 2, 0):
            check(compiled, model, (batch, 3, 8, 8))


@pytest.mark.parametrize("threads", [-1, 0, 1, 2])
def test_no_planes_and_no_threads_are_no_work(threads):
    x, y = torch.ones(1, 2), torch.empty(3, 4)
    pointers = x.data_ptr(), y.data_ptr()
    assert kernels().torchcram_pad(pointers[0], 0, 1, 2, 1, 1, 3, 4, 1, pointers[1], threads) == 1
    assert kernels().torchcram_pad(pointers[0], 1, 1, 2, 1, 1, 3, 4, 1, pointers[1], threads) == 1
    assert y.tolist() == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
