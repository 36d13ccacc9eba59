"""Images that are cut into tiles: copies, convolutions, and graphs in parts."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_model, sparse_weight
from torch import fx, nn
from torch.nn import functional

from torchcram.runtime import prepare, report
from torchcram.runtime.cpu import replace_layers
from torchcram.runtime.cpu.image_parts import ForImageSize, ImageParts, split_into_parts
from torchcram.runtime.cpu.modules import SparseConv2d
from torchcram.runtime.cpu.ops.image_layout import cut_into_tiles, images_innermost, join_tiles
from torchcram.runtime.cpu.packing import Geometry

pytestmark = needs_kernels

lay_out = torch.ops.torchcram.lay_out_images
TILES = [(1, 1), (4, 4), (2, 2), (1, 2), (4, 1), (2, 8), (16, 1)]


@given(
    st.sampled_from(TILES),
    *(st.integers(0, 5), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20)),
)
@pytest.mark.usefixtures("each_level")
def test_images_are_cut_and_put_together_again(tiles, images, channels, height, width):
    x = torch.randn(images, channels, height * tiles[0], width * tiles[1])
    inner = lay_out(x, True, tiles)
    assert torch.equal(inner, cut_into_tiles(x, tiles))
    assert inner.permute(2, 3, 1, 0).is_contiguous()
    outer = lay_out(inner, False, tiles)
    assert torch.equal(outer, x)
    assert outer.is_contiguous()
    assert torch.equal(join_tiles(cut_into_tiles(x, tiles), tiles), x)


def test_tiles_are_numbered_row_by_row():
    x = torch.arange(2 * 4 * 6).view(2, 1, 4, 6)
    tiles = cut_into_tiles(x, (2, 3))
    assert tiles.shape == (12, 1, 2, 2)
    assert tiles[:4, 0, 0, 0].tolist() == [0, 2, 4, 12]
    assert tiles[6, 0].tolist() == [[24, 25], [30, 31]]


def test_images_that_cannot_be_cut_are_refused():
    with pytest.raises(ValueError, match="images of 6 x 5 cannot be cut into 2 x 2"):
        lay_out(torch.randn(1, 3, 6, 5), True, (2, 2))
    with pytest.raises(ValueError, match="6 tiles are no whole images of 2 x 2 tiles"):
        lay_out(torch.randn(6, 3, 4, 4), False, (2, 2))
    with pytest.raises(ValueError, match=r"at least 1, got \(0, 2\)"):
        lay_out(torch.randn(6, 3, 4, 4), True, (0, 2))


@pytest.mark.parametrize("innermost", [False, True])
def test_derivatives_of_copies(innermost):
    x = torch.randn(4, 2, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: lay_out(x, innermost, (2, 2)), x)
    torch.library.opcheck(lay_out.default, (torch.randn(4, 2, 2, 4), innermost, (2, 2)))


SIDE = st.tuples(*(st.integers(1, 4), st.integers(1, 2), st.integers(0, 4), st.integers(1, 2)))


@given(
    st.sampled_from(TILES),
    *(st.tuples(SIDE, SIDE), st.tuples(st.integers(1, 6), st.integers(1, 6))),
    *(st.sampled_from([1, 2, 3, 17]), st.booleans()),
)
@pytest.mark.usefixtures("each_level")
def test_convolutions_of_tiles_are_those_of_images(tiles, sides, tile, images, relu):
    geometry = Geometry(*zip(*sides, strict=True))
    size = (tile[0] * tiles[0], tile[1] * tiles[1])
    assume(min(geometry.output(*size)) >= 1)
    x, weight, bias = torch.randn(images, 3, *size), sparse_weight(5, 3, *geometry.kernel), None
    expected = functional.conv2d(
        *(x.double(), weight.double(), bias),
        *(geometry.stride, geometry.padding, geometry.dilation),
    )
    residual = torch.randn_like(expected).float()
    expected = (expected + residual).relu() if relu else expected + residual
    layer = SparseConv2d(weight, bias, geometry, by_images=True, relu=relu, tiles=tiles)
    cut = images_innermost(x, tiles)
    if not geometry.fits_tiles(size, tiles):
        with pytest.raises(ValueError, match=r"cannot be convolved|does not fit|cannot be cut"):
            layer(cut, images_innermost(residual, tiles))
        return
    y = layer(cut, images_innermost(residual, tiles))
    assert y.permute(2, 3, 1, 0).is_contiguous()
    assert relative_error(join_tiles(y, tiles), expected) < 2e-6
    dense = layer(cut.clone().requires_grad_(), images_innermost(residual, tiles))
    assert relative_error(dense.detach(), y) < 2e-6


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.usefixtures("each_level")
def test_narrow_tiles_read_nothing_beyond_the_next_tile(width, kernel):
    # `make sanitize` notices reads beyond the images.
    weight, geometry = sparse_weight(5, 3, kernel, kernel), Geometry((kernel, kernel))
    geometry = replace(geometry, padding=(kernel // 2, kernel // 2))
    layer = SparseConv2d(weight, None, geometry, by_images=True, tiles=(1, 16))
    x = torch.randn(1, 3, 2, 16 * width)
    y = lay_out(layer(images_innermost(x, (1, 16))), False, (1, 16))
    expected = functional.conv2d(x, weight, padding=kernel // 2)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("images", [0, 1, 5])
def test_threads_and_empty_batches(threads, images):
    weight, bias, geometry = (
        sparse_weight(7, 3, 3, 3),
        torch.randn(7),
        Geometry((3, 3), (2, 2), (1, 1)),
    )
    x = torch.randn(images, 3, 16, 24)
    layer = SparseConv2d(weight, bias, geometry, by_images=True, tiles=(4, 4))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        y = lay_out(layer(images_innermost(x, (4, 4))), False, (4, 4))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(y, functional.conv2d(x, weight, bias, 2, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("tiles", "by_images", "message"),
    [
        ((2, 2), False, "need panels of images"),
        ((3, 1), True, "must be 1, 2, 4, 8 or 16 in all"),
        ((8, 4), True, "must be 1, 2, 4, 8 or 16 in all"),
        ((0, 4), True, "must be 1, 2, 4, 8 or 16 in all"),
        ((-1, -4), True, "must be 1, 2, 4, 8 or 16 in all"),
        ((2, 8), True, "8 tiles of 4 x 4 pixels"),  # half an image
    ],
)
def test_tiles_that_the_kernels_do_not_know_are_refused(tiles, by_images, message):
    geometry = Geometry((3, 3), padding=(1, 1))
    layer = SparseConv2d(
        sparse_weight(4, 3, 3, 3), None, geometry, by_images=by_images, tiles=tiles
    )
    with pytest.raises(ValueError, match=message):
        layer(torch.randn(8, 3, 4, 4))


def test_the_operator_is_what_torch_expects():
    conv = SparseConv2d(
        *(sparse_weight(6, 3, 3, 3), None, Geometry((3, 3), padding=(1, 1))),
        by_images=True,
        tiles=(2, 2),
    )
    x = images_innermost(torch.randn(2, 3, 8, 8), (2, 2))
    arguments = (x, conv.packed, None, None, 6, conv._numbers, True, True, False, (2, 2))
    torch.library.opcheck(
        torch.ops.torchcram.sparse_conv2d.default,
        arguments,
        test_utils=("test_schema", "test_faketensor"),
    )
    assert "tiles=(2, 2)" in repr(conv)


class Residual(nn.Module):
    """Convolutions of three sizes of images: 16 x 16, 8 x 8 and 4 x 4."""

    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.MaxPool2d(3, 1, 1)
        self.norm = nn.BatchNorm2d(8)
        self.one, self.two = (nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.down, self.short = nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(8, 16, 1, 2)
        self.last, self.head = nn.Conv2d(16, 16, 3, 2, 1), nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(torch.relu(self.norm(self.stem(x))))
        x = torch.relu(x + self.two(torch.relu(self.one(x))))  # the pooled images are a residual
        x = torch.relu(self.down(x) + self.short(x))
        return self.head(torch.relu(self.last(x)).mean((2, 3)))


@pytest.fixture
def tiles_win(monkeypatch):
    """Every race is won by tiles, panels of images or sparse kernels."""
    monkeypatch.setattr(replace_layers, "_LEAST", 0.0)

    def times(work):
        order = ("in tiles", "by_images", "sparse")
        ahead = next((name for name in order if name in work), None)
        return {name: 0.1 if name in (ahead, "copy") else 1.0 for name in work}

    monkeypatch.setattr(replace_layers, "time_in_turns", times)


def tiles_of(model):
    """Tiles of the convolutions of a prepared model, by the last part of their names."""
    return {
        name.split(".")[-1]: layer.tiles
        for name, layer in model.named_modules()
        if isinstance(layer, SparseConv2d)
    }


@pytest.mark.usefixtures("tiles_win")
@pytest.mark.parametrize("images", [1, 2, 4, 9, 20])
def test_models_in_tiles(images):
    model, x = sparse_model(Residual().eval()), torch.randn(images, 3, 16, 16)
    fast = prepare(model, x)
    assert isinstance(fast, ForImageSize)
    tiles = tiles_of(fast.model)
    large = dict.fromkeys(("stem", "one", "two", "down", "short"), (4, 4))
    assert {name: tiles[name] for name in large} == large
    assert tiles["last"] == ((2, 2) if images >= 4 else (4, 4))
    assert isinstance(fast.model, ImageParts) == (images > 1)
    names = [choice.name for choice in report(fast)]
    assert sorted(name.split(".")[-1] for name in names) == sorted([*tiles, "head"])
    assert all(fast.get_submodule(name) for name in names)
    with torch.inference_mode():
        for shape in [(images, 16, 16), (3, 16, 16), (17, 16, 16), (2, 12, 20), (1, 16, 32)]:
            x = torch.randn(shape[0], 3, *shape[1:])
            assert relative_error(fast(x), model(x)) < 1e-6
        assert fast(torch.randn(0, 3, 16, 16)).shape == (0, 10)
        assert torch.equal(copy.deepcopy(fast)(x), fast(x))
        assert torch.equal(pickle.loads(pickle.dumps(fast))(x), fast(x))  # noqa: S301


@pytest.mark.usefixtures("tiles_win")
def test_derivatives_of_models_in_tiles():
    model, x = sparse_model(Residual().eval()), torch.randn(1, 3, 16, 16, requires_grad=True)
    fast = prepare(model, x.detach())
    expected = torch.autograd.grad(model(x).square().sum(), x)[0]
    assert relative_error(torch.autograd.grad(fast(x).square().sum(), x)[0], expected) < 1e-5


@pytest.mark.usefixtures("tiles_win")
@pytest.mark.parametrize("images", [1, 4])
def test_images_that_cannot_be_cut_stay_whole(images):
    model, x = sparse_model(Residual().eval()), torch.randn(images, 3, 17, 17)
    fast = prepare(model, x)
    assert set(tiles_of(fast).values()) == {(1, 1)}
    with torch.inference_mode():
        assert relative_error(fast(x), model(x)) < 1e-6


def test_a_graph_is_cut_where_everything_depends_on_one_result():
    graph = fx.symbolic_trace(sparse_model(Residual().eval()))
    sizes = {"stem": 16, "one": 16, "two": 16, "down": 16, "short": 16, "last": 8}
    shapes = {name: (1, 8, size, size) for name, size in sizes.items()}
    parts = split_into_parts(graph, shapes)
    assert [part.images for part in parts] == [1, 4]
    x = torch.randn(5, 3, 16, 16)
    with torch.no_grad():
        expected = graph(x)
        for part in parts:
            x = part.graph(x)
        assert torch.equal(x, expected)
    assert [part.images for part in split_into_parts(graph, shapes | {"last": (1, 8, 4, 4)})] == [
        1,
        16,
    ]


def test_a_branch_over_the_whole_graph_is_not_cut():
    class Branch(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.two(self.one(x)) + x.sum(1, keepdim=True)

    graph = fx.symbolic_trace(sparse_model(Branch().eval()))
    shapes = {"one": (1, 3, 16, 16), "two": (1, 3, 8, 8)}
    assert [part.images for part in split_into_parts(graph, shapes)] == [4]
