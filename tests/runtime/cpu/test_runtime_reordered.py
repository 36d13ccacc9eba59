"""Layers that stay dense, with their weight in the layout of oneDNN."""

import copy
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchcram import runtime
from torchcram.runtime.cpu import replace_layers
from torchcram.runtime.cpu.reordered import (
    ReorderedConv2d,
    ReorderedLinear,
    _layouts,
    can_reorder,
)

pytestmark = [
    pytest.mark.skipif(not can_reorder(), reason="this torch has no oneDNN"),
    pytest.mark.skipif(not runtime.available(), reason="the kernels are not built"),
]


@pytest.fixture
def _onednn_wins(monkeypatch):
    monkeypatch.setattr(
        replace_layers,
        "time_in_turns",
        lambda work: {key: 1.0 if key in ("reordered", "sparse") else 2.0 for key in work},
    )


@given(
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    tokens=st.lists(st.integers(0, 5), max_size=3),
    bias=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_outputs_are_those_of_a_linear_layer(inputs, outputs, tokens, bias, seed):
    torch.manual_seed(seed)
    layer, x = nn.Linear(inputs, outputs, bias=bias), torch.randn(*tokens, inputs)
    with torch.no_grad():
        torch.testing.assert_close(ReorderedLinear(layer)(x), layer(x), rtol=1e-4, atol=1e-5)


@given(
    images=st.integers(0, 3),
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    size=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    channels_last=st.booleans(),
    bias=st.booleans(),
)
def test_the_outputs_are_those_of_a_convolution(
    images, channels, size, kernel, stride, padding, dilation, channels_last, bias
):
    torch.manual_seed(0)
    layer = nn.Conv2d(*channels, kernel, stride, padding, dilation, bias=bias)
    x = torch.randn(images, channels[0], *size)
    if channels_last:
        layer, x = (each.to(memory_format=torch.channels_last) for each in (layer, x))
    fast = ReorderedConv2d(layer)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), layer(x), rtol=1e-4, atol=1e-4)
        if images:
            torch.testing.assert_close(fast(x[0]), layer(x[0]), rtol=1e-4, atol=1e-4)


@given(
    images=st.integers(0, 3),
    relu=st.booleans(),
    with_residual=st.booleans(),
    formats=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_a_convolution_adds_a_residual_and_applies_relu(
    images, relu, with_residual, formats, dtype
):
    torch.manual_seed(0)
    layer = nn.Conv2d(5, 7, 3, 2, 1).to(dtype)
    fast = ReorderedConv2d(layer)
    fast.relu = relu
    tensors = [torch.randn(images, 5, 9, 9, dtype=dtype), torch.randn(images, 7, 5, 5, dtype=dtype)]
    for i, channels_last in enumerate(formats):
        if channels_last:
            tensors[i] = tensors[i].to(memory_format=torch.channels_last)
    x, residual = tensors[0], tensors[1] if with_residual else None
    before = None if residual is None else residual.clone()
    expected = layer(x) if residual is None else layer(x) + residual
    expected = expected.relu() if relu else expected
    with torch.no_grad():
        torch.testing.assert_close(fast(x, residual), expected, rtol=1e-4, atol=1e-4)
    if residual is not None:
        assert torch.equal(residual, before)
    with torch.enable_grad():  # derivatives need the dense implementation
        torch.testing.assert_close(fast(x, residual), expected, rtol=1e-4, atol=1e-4)


class Residual(nn.Module):
    """relu(norm(conv(x)) + x), and another ReLU after a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = (
            nn.Conv2d(4, 4, 3, 1, 1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 2, 1),
        )

    def forward(self, x):
        return self.last((self.norm(self.conv(x)) + x).relu()).relu()


@pytest.mark.usefixtures("_onednn_wins")
@pytest.mark.parametrize("images", [1, 3])
def test_dense_convolutions_of_a_graph_compute_what_follows(images):
    model, x = Residual().eval(), torch.randn(images, 4, 6, 6)
    fast = runtime.prepare(model, x)
    layers = [module for module in fast.modules() if isinstance(module, ReorderedConv2d)]
    assert [layer.relu for layer in layers] == [True, True]
    names = [str(node.target) for node in fast.graph.nodes if node.op != "placeholder"]
    assert names == ["conv", "last", "output"]
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fast(x[:, :, 1:]), model(x[:, :, 1:]), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_changes_of_the_weight_are_noticed():
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    fast = ReorderedLinear(layer)
    fast(x)
    layer.weight.mul_(2)
    torch.testing.assert_close(fast(x), layer(x))
    fast.weight = nn.Parameter(torch.ones(8, 8))
    torch.testing.assert_close(fast(x), x.sum(1, keepdim=True) + layer.bias)


def test_rearranged_weights_are_given_up_with_their_layer():
    before = len(_layouts)
    layer = ReorderedLinear(nn.Linear(8, 8))
    with torch.no_grad():
        layer(torch.randn(3, 8))
    assert len(_layouts) == before + 1
    del layer
    assert len(_layouts) == before


def test_derivatives_are_those_of_a_linear_layer():
    layer, x = nn.Linear(8, 5), torch.randn(3, 8, requires_grad=True)
    fast = ReorderedLinear(layer)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    (actual,) = torch.autograd.grad(fast(x).square().sum(), x)
    torch.testing.assert_close(actual, expected)
    jacobians = torch.func.vmap(torch.func.jacrev(fast))(torch.randn(4, 8))
    torch.testing.assert_close(jacobians, layer.weight.expand(4, 5, 8))


@pytest.mark.parametrize(
    ("x", "error"), [(torch.ones(2, 3), RuntimeError), (torch.ones(2, 8).double(), RuntimeError)]
)
def test_inputs_that_do_not_fit_are_refused_as_by_a_linear_layer(x, error):
    with pytest.raises(error):
        ReorderedLinear(nn.Linear(8, 4))(x)


def test_inference_mode():
    layer, x = nn.Linear(8, 4), torch.randn(3, 8)
    with torch.inference_mode():
        made_here = nn.Linear(8, 4)
        torch.testing.assert_close(ReorderedLinear(made_here)(x), made_here(x))
        torch.testing.assert_close(ReorderedLinear(layer)(x), layer(x))


@pytest.mark.usefixtures("_onednn_wins")
def test_prepare_uses_it_for_dense_layers_where_it_is_faster():
    model, x = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)), torch.randn(5, 16)
    fast = runtime.prepare(model, x, fuse=False)
    assert [type(layer) for layer in fast[::2]] == [ReorderedLinear] * 2
    choice = runtime.report(fast)[0]
    assert not choice.sparse
    assert "zeros; oneDNN, which rearranges the weight once, is 2.00 times as fast" in str(choice)
    assert fast.state_dict().keys() == model.state_dict().keys()
    buffer = io.BytesIO()
    torch.save(fast, buffer)
    buffer.seek(0)
    others = (
        fast,
        copy.deepcopy(fast),
        torch.load(buffer, weights_only=False),
        torch.compile(fast, backend="aot_eager"),
    )
    with torch.no_grad():
        for other in others:
            torch.testing.assert_close(other(x), model(x))


@pytest.mark.usefixtures("_onednn_wins")
@pytest.mark.parametrize("fuse", [True, False])
def test_convolutions_of_a_model(fuse):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    x = torch.randn(20, 3, 9, 9)
    fast = runtime.prepare(model.eval(), x, fuse=fuse)
    assert any(isinstance(layer, ReorderedConv2d) for layer in fast.modules())
    with torch.no_grad():
        for other in (fast, copy.deepcopy(fast), torch.compile(fast, backend="aot_eager")):
            torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("_onednn_wins")
def test_sparse_kernels_have_to_be_faster_than_that():
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[torch.rand(64, 64) < 0.8] = 0
    fast = runtime.prepare(nn.Sequential(layer), torch.randn(5, 64), fuse=False)
    assert type(fast[0]) is ReorderedLinear
    assert "less than the 1.05 times that count as faster; oneDNN" in str(runtime.report(fast)[0])


@pytest.mark.usefixtures("_onednn_wins")
def test_shared_weights_stay_shared():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    fast = runtime.prepare(model, torch.randn(3, 8), fuse=False)
    assert fast[0].weight is fast[1].weight
