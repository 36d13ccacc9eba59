"""Memory formats: outputs lie in memory as those of dense layers, and so do inputs in timings."""

import pickle

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_model, sparse_weight
from torch import nn

from torchcram import runtime
from torchcram.runtime import prepare
from torchcram.runtime.cpu import replace_layers
from torchcram.runtime.cpu.memory_format import is_channels_last
from torchcram.runtime.cpu.modules import SparseConv2d
from torchcram.runtime.cpu.ops.image_layout import images_innermost
from torchcram.runtime.cpu.packing import Geometry
from torchcram.runtime.cpu.replace_layers import LayerInput, geometry_of

pytestmark = needs_kernels

LAST = torch.channels_last
FORMATS = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=LAST),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "by strides": lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2),
    "images innermost": images_innermost,
}


def sparse_of(layer, *, by_images):
    return SparseConv2d(layer.weight, layer.bias, geometry_of(layer), by_images=by_images)


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("weights_last", [False, True])
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("channels", "features", "kernel"), [(5, 7, 3), (1, 7, 3), (5, 1, 1), (5, 7, 1)]
)
@pytest.mark.parametrize("size", [(3, 6, 5), (1, 6, 5), (3, 1, 1), (0, 6, 5)])
def test_outputs_lie_as_those_of_dense(
    by_images, weights_last, form, channels, features, kernel, size
):
    layer = nn.Conv2d(channels, features, kernel, padding=kernel // 2)
    if weights_last:
        layer = layer.to(memory_format=LAST)
    x = FORMATS[form](torch.randn(size[0], channels, *size[1:]))
    found, expected = sparse_of(layer, by_images=by_images)(x), layer(x)
    assert found.shape == expected.shape
    if (
        by_images
        and form == "images innermost"
        and not x.is_contiguous()
        and not is_channels_last(x)
    ):
        assert found.permute(2, 3, 1, 0).is_contiguous()  # what the next layer reads fastest
        expected = found
    assert found.stride() == expected.stride()
    if len(x):
        torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("form", ["contiguous", "channels_last", "images innermost"])
def test_torch_knows_the_strides(by_images, form):
    weight = sparse_weight(6, 3, 3, 3)
    for channels_last in (False, True):
        conv = SparseConv2d(weight, None, Geometry((3, 3)), by_images=by_images)
        x = FORMATS[form](torch.randn(4, 3, 6, 6))
        arguments = (x, conv.packed, None, None, 6, conv._numbers, by_images, True, channels_last)
        operator = torch.ops.torchcram.sparse_conv2d.default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("by_images", [False, True])
def test_a_residual_may_lie_otherwise(by_images):
    layer = sparse_of(nn.Conv2d(4, 4, 3, padding=1), by_images=by_images)
    x, residual = torch.randn(3, 4, 6, 5), torch.randn(3, 4, 6, 5)
    expected = layer(x) + residual
    for given in FORMATS.values():
        for added in FORMATS.values():
            torch.testing.assert_close(layer(given(x), added(residual)), expected)


class Depthwise(nn.Module):
    """The manner of ConvNeXt: dimensions are permuted, so that images come in channels_last."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 2, stride=2), nn.LayerNorm(8)
        self.down = nn.Conv2d(8, 16, 2, stride=2)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x):
        x = self.norm(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.depthwise(self.down(x))


def formats_of(model, x):
    """Which layers receive images in channels_last."""
    received = {}
    for name, layer in model.named_modules():
        if isinstance(layer, (nn.Conv2d, SparseConv2d)):
            layer.register_forward_pre_hook(
                lambda _, args, name=name: received.update({name: is_channels_last(args[0])})
            )
    with torch.no_grad():
        model(x)
    return received


@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("fuse", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_every_layer_of_a_prepared_model_receives_what_it_did(batch, fuse, last):
    model, x = sparse_model(Depthwise()), torch.randn(batch, 3, 16, 16)
    if last:
        model, x = model.to(memory_format=LAST), x.contiguous(memory_format=LAST)
    expected = formats_of(model, x)
    assert expected["depthwise"]
    fast = prepare(model, x, fuse=fuse)
    found = {name.removeprefix("model."): last for name, last in formats_of(fast, x).items()}
    assert sum(isinstance(m, SparseConv2d) for m in fast.modules()) == 2
    assert found["depthwise"]
    if not any(isinstance(m, SparseConv2d) and m.by_images for m in fast.modules()):
        assert found == expected
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


class Chain(nn.Module):
    """Neighbouring convolutions, one of them read by a layer of another kind as well."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.drop, self.pool = nn.Dropout(0.5), nn.MaxPool2d(2)
        self.three, self.fc = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8 * 16, 4)

    def forward(self, x):
        x = torch.relu(self.one(x))
        y = self.two(self.drop(x)) + x
        y = self.three(self.pool(nn.functional.silu(y)))
        return self.fc(y.view(y.shape[0], 128)), y  # a view takes contiguous outputs


@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize("fuse", [False, True])
def test_a_chain_hands_on_images_innermost(fuse):
    model, x = sparse_model(Chain()), torch.randn(16, 3, 8, 8)
    fast = prepare(model, x, fuse=fuse)
    convolutions = [m for m in fast.modules() if isinstance(m, SparseConv2d)]
    assert [m.by_images for m in convolutions] == [True] * 3
    copied = pickle.loads(pickle.dumps(fast))  # noqa: S301
    torch.testing.assert_close(copied(x), fast(x))
    copies = []
    for layer in convolutions:
        layer.register_forward_pre_hook(
            lambda _, args: copies.append(not args[0].permute(2, 3, 1, 0).is_contiguous())
        )
    for given in (x, x[:1], x[:0], torch.randn(33, 3, 8, 8)):
        copies.clear()
        scores, images = fast(given)
        assert images.is_contiguous()
        assert not fuse or not any(copies)
        torch.testing.assert_close((scores, images), model.eval()(given), rtol=1e-4, atol=1e-5)
    if fuse:
        operator = torch.ops.torchcram.lay_out_images
        copies = [node.args[1] for node in fast.graph.nodes if node.target is operator]
        assert copies.count(True) == 2  # the input, what was pooled
        assert copies.count(False) == 2  # for the pooling, and at the end


def test_what_a_layer_receives():
    x = torch.randn(2, 3, 4, 5)
    assert str(LayerInput.of(x)) == "2x3x4x5"
    last = LayerInput.of(x.contiguous(memory_format=LAST))
    assert str(last) == "2x3x4x5 (channels_last)"
    assert is_channels_last(last.sample())
    for given in (x.transpose(0, 3), x[:, :1].expand(2, 7, 4, 5), torch.randn(4, 6)[:, ::2]):
        received = LayerInput.of(given)
        assert str(received).endswith(" (not contiguous)")
        assert received.sample().stride() == given.stride()
        assert received.sample().shape == given.shape


@pytest.fixture
def timed(monkeypatch):
    """The inputs that layers are timed with, by the way they run; sparse kernels win."""
    inputs = []

    def race(work):
        inputs.append({way: call.args[-1] for way, call in work.items() if call.args})
        return {way: -i for i, way in enumerate(work)}

    monkeypatch.setattr(replace_layers, "time_in_turns", race)
    return inputs


def test_layers_are_timed_in_the_format_they_receive(timed):
    model, x = sparse_model(Depthwise()), torch.randn(2, 3, 16, 16)
    expected = formats_of(model, x)
    choices = {c.name: c for c in runtime.report(prepare(model, x, fuse=False))}
    assert [is_channels_last(given["dense"]) for given in timed[:2]] == [False, True]
    assert [is_channels_last(given["sparse"]) for given in timed[:2]] == [False, True]
    assert not expected["stem"]
    assert expected["down"]
    assert "on 2x8x8x8 (channels_last) (" in choices["down"].reason


def test_transposing_for_panels_of_images_is_part_of_the_time(timed):
    model, x = sparse_model(nn.Sequential(nn.Conv2d(3, 8, 3))), torch.randn(16, 3, 9, 9)
    for given in (x, x.contiguous(memory_format=LAST)):
        timed.clear()
        prepare(model, given, fuse=False)
        assert timed[0]["by_images"].stride() == given.stride()


def test_layers_alike_in_another_format_are_timed_again(timed):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x):
            return self.two(self.one(x).contiguous(memory_format=LAST))

    prepare(sparse_model(Twice()), torch.randn(2, 4, 6, 6), fuse=False)
    assert [is_channels_last(given["dense"]) for given in timed[:2]] == [False, True]


def test_relative_error_of_a_model_in_channels_last():
    model, x = sparse_model(Depthwise()), torch.randn(3, 3, 16, 16).contiguous(memory_format=LAST)
    fast = prepare(model.to(memory_format=LAST), x)
    assert relative_error(fast(x), model(x)) < 1e-5
