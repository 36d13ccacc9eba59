"""Sparse layers as modules: copied, pickled, saved, loaded, compiled, exported."""

import copy
import pickle

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_weight
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from torchcram.kernels.cpu.library import has_int8
from torchcram.runtime.cpu import reordered  # noqa: F401  registers the operators
from torchcram.runtime.cpu.modules import (
    SparseConv2d,
    SparseFeedForward,
    SparseLinear,
    SparseLinearInt8,
)
from torchcram.runtime.cpu.packing import Geometry, pack_linear

pytestmark = needs_kernels


def linear():
    return SparseLinear(sparse_weight(12, 20), torch.randn(12))


def net():
    conv = SparseConv2d(sparse_weight(6, 3, 3, 3), torch.randn(6), Geometry((3, 3)), relu=True)
    return nn.Sequential(conv, nn.Flatten(), SparseLinear(sparse_weight(4, 96), torch.randn(4)))


def test_a_copy_and_a_pickle_compute_the_same():
    layer, x = linear(), torch.randn(5, 20)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), layer(x))  # noqa: S301


def test_the_state_of_another_mask_is_loaded():
    one, two, x = (
        linear(),
        SparseLinear(sparse_weight(12, 20, sparsity=0.2), None),
        torch.randn(5, 20),
    )
    two.bias = torch.zeros(12)
    assert one.packed.shape != two.packed.shape
    two.load_state_dict(one.state_dict())
    assert torch.equal(one(x), two(x))


def test_a_bad_state_is_refused():
    layer = linear()
    state = layer.state_dict()
    state["packed"] = state["packed"][:-64]
    with pytest.raises(ValueError, match="not a packed sparse matrix"):
        layer.load_state_dict(state)


def test_a_state_that_does_not_fit_is_refused_at_the_call():
    layer, x = linear(), torch.randn(5, 20)
    state = {"packed": layer.packed, "bias": layer.bias.double()}
    layer.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"bias is of shape \(12,\) and torch\.float64"):
        layer(x)
    first = SparseLinear(sparse_weight(16, 20), torch.zeros(16))
    second = SparseLinear(sparse_weight(3, 16), torch.zeros(3))
    both = SparseFeedForward(first, second, activation="relu")
    first.packed, second.packed = pack_linear(torch.ones(64, 20)), pack_linear(torch.ones(3, 64))
    with pytest.raises(ValueError, match=r"bias is of shape \(16,\).* 64 values"):
        both(x)


def test_an_empty_layer_is_refused():
    with pytest.raises(ValueError, match=r"weight of shape \(0, 5\).*at least one"):
        SparseLinear(torch.zeros(0, 5), None)


def test_the_dense_weight_is_still_there():
    weight = sparse_weight(12, 20)
    assert torch.equal(SparseLinear(weight, torch.ones(12)).weight, weight)
    geometry = Geometry((3, 2), stride=(2, 1), padding=(1, 1), dilation=(1, 2))
    weight = sparse_weight(5, 4, 3, 2)
    for by_images in (False, True):
        conv = SparseConv2d(weight, torch.ones(5), geometry, by_images=by_images)
        assert torch.equal(conv.weight, weight)


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("kernel", [(1, 1), (1, 3), (3, 1), (2, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_the_dense_weight_of_any_dilation(by_images, kernel, dilation):
    weight = sparse_weight(5, 4, *kernel)
    geometry = Geometry(kernel, stride=(2, 1), padding=(1, 2), dilation=dilation)
    conv = SparseConv2d(weight, torch.ones(5), geometry, by_images=by_images)
    assert torch.equal(conv.weight, weight)


def test_conversions_leave_it_alone():
    layer, x = linear(), torch.randn(5, 20)
    expected = layer(x)
    assert torch.equal(layer.to(torch.bfloat16)(x), expected)
    assert torch.equal(layer.half()(x), expected)


def test_they_name_themselves():
    assert repr(linear()) == "SparseLinear(20, 12, activation='none')"
    assert "by_images=False, relu=True" in repr(net())


@pytest.mark.parametrize("by_images", [False, True])
def test_operators_are_what_torch_expects(by_images):
    layer, x = linear(), torch.randn(5, 20)
    arguments = (x, layer.packed, layer.bias, torch.randn(5, 12), 12, "gelu")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.torchcram.sparse_linear.default, arguments, test_utils=checks)
    conv = SparseConv2d(sparse_weight(6, 3, 3, 3), None, Geometry((3, 3)), by_images=by_images)
    arguments = (
        torch.randn(4, 3, 6, 6),
        conv.packed,
        None,
        None,
        6,
        conv._numbers,
        by_images,
        True,
    )
    torch.library.opcheck(torch.ops.torchcram.sparse_conv2d.default, arguments, test_utils=checks)
    both = SparseFeedForward(layer, SparseLinear(sparse_weight(3, 12), None), activation="relu")
    arguments = (x, layer.packed, layer.bias, "relu", both.second.packed, None, None, 3)
    torch.library.opcheck(
        torch.ops.torchcram.sparse_feed_forward.default, arguments, test_utils=checks
    )


OPERATORS = torch.ops.torchcram


def calls_by_name():
    x, images = torch.randn(2, 3, 20), torch.randn(4, 3, 7, 6)
    ends = {"residual": None, "features": 12, "activation": "relu"}
    first, second = linear(), SparseLinear(sparse_weight(7, 12), None)
    yield OPERATORS.sparse_linear, {"x": x, "packed": first.packed, "bias": None, **ends}
    both = {"x": x, "packed": first.packed, "bias": first.bias, "activation": "relu"}
    both |= {"then": second.packed, "then_bias": None, "residual": None, "features": 7}
    yield OPERATORS.sparse_feed_forward, both
    yield OPERATORS.sparse_feed_forward, {**both, "middle": None}
    yield OPERATORS.sparse_feed_forward, {**both, "middle": 12}
    conv = SparseConv2d(sparse_weight(6, 3, 3, 2), None, Geometry((3, 2), stride=(2, 1)))
    plain = {"x": images, "packed": conv.packed, "bias": None, "residual": None, "features": 6}
    plain |= {"geometry": conv._numbers, "by_images": False, "relu": True}
    yield OPERATORS.sparse_conv2d, plain
    yield OPERATORS.sparse_conv2d, {**plain, "channels_last": False}
    yield OPERATORS.sparse_conv2d, {**plain, "channels_last": True}
    sequence = {"query": x, "key": x, "value": x}
    yield OPERATORS.attention, {**sequence, "heads": 2, "scale": 0.3}
    yield OPERATORS.rms_norm, {"x": x.transpose(0, 1), "weight": torch.randn(20), "eps": 1e-5}
    yield OPERATORS.silu_and_mul, {"gate": x.transpose(0, 1), "up": x.transpose(0, 1)}
    weight = {"x": x, "weight": torch.randn(7, 20), "bias": None}
    yield OPERATORS.reordered_linear, weight
    if has_int8():
        one, two = (SparseLinearInt8(sparse_weight(*size), None) for size in ((12, 20), (7, 12)))
        layer = {"packed": one.packed, "start": one.start, "scales": one.scales, "bias": None}
        yield OPERATORS.sparse_linear_int8, {"x": x, **layer, **ends}
        then = {"packed": two.packed, "start": two.start, "scales": two.scales, "bias": None}
        layer |= {f"then_{name}": tensor for name, tensor in then.items()}
        yield OPERATORS.sparse_feed_forward_int8, {"x": x, **layer, **ends, "features": 7}


def test_outputs_without_data_have_the_same_shape_and_strides():
    """With arguments by name, and with those left out that have a default."""
    for operator, arguments in calls_by_name():
        expected = operator(**arguments)
        with FakeTensorMode(allow_non_fake_inputs=True):
            empty = operator(**arguments)
        assert isinstance(empty, FakeTensor)
        assert (empty.shape, empty.stride()) == (expected.shape, expected.stride()), operator


@pytest.mark.parametrize("shape", [(3, 7, 6), (1, 4, 3, 7, 6)])
def test_convolutions_without_data_refuse_what_is_no_batch_of_images(shape):
    conv = SparseConv2d(sparse_weight(6, 3, 3, 3), None, Geometry((3, 3)))
    arguments = (conv.packed, None, None, 6, conv._numbers, False, False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(shape)
        with pytest.raises(ValueError, match=r"not \(images, channels, rows, columns\)"):
            OPERATORS.sparse_conv2d(x, *arguments)


def test_export_keeps_the_operators():
    model, x = net(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        assert "torchcram.sparse_conv2d" in str(exported.graph)
        assert torch.equal(exported.module()(x), model(x))


def test_compiled_it_computes_the_same():
    model, x = net(), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert relative_error(compiled(x), model(x)) < 1e-6
        assert relative_error(compiled(x[:1]), model(x[:1])) < 1e-6


@pytest.mark.parametrize("by_images", [False, True])
def test_what_is_added_is_read_in_its_own_shape_and_type(by_images):
    x = torch.randn(4, 3, 6, 6)
    conv = SparseConv2d(sparse_weight(6, 3, 3, 3), None, Geometry((3, 3)), by_images=by_images)
    shift = torch.randn(6, 1, 1)
    torch.testing.assert_close(conv(x, shift), conv(x) + shift)
    for layer, given in ((conv, x), (linear(), torch.randn(5, 20))):
        short = torch.zeros(1, dtype=torch.bfloat16)
        with pytest.raises(ValueError, match=r"float32, not torch\.bfloat16"):
            layer(given, short)
