"""Sparse convolutions against float64: every geometry, remainder and instruction set."""

import pytest
import torch
from native_library import needs_kernels
from sparse_cases import relative_error, sparse_weight
from torch.nn import functional

from torchcram.runtime.cpu.modules import SparseConv2d
from torchcram.runtime.cpu.ops.image_layout import images_innermost
from torchcram.runtime.cpu.packing import (
    PAIRS,
    QUAD_ROWS,
    Geometry,
    check_packed,
    pack_images,
    pack_linear,
)

pytestmark = needs_kernels

OPERATOR = torch.ops.torchcram.sparse_conv2d
GEOMETRIES = [
    Geometry((1, 1)),
    Geometry((3, 3), padding=(1, 1)),
    Geometry((3, 3), stride=(2, 2), padding=(1, 1)),
    Geometry((1, 1), stride=(2, 2)),
    Geometry((7, 7), stride=(2, 2), padding=(3, 3)),
    Geometry((3, 2), stride=(1, 3), padding=(2, 1), dilation=(2, 1)),
    Geometry((2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2)),
    Geometry((3, 3), padding=(4, 4)),  # some outputs see nothing but padding
    Geometry((2, 2), stride=(5, 5), padding=(4, 0)),  # some pixels are not used
]


def reference(x, weight, bias, geometry, residual=None, relu=False):
    y = functional.conv2d(
        x.double(),
        weight.double(),
        None if bias is None else bias.double(),
        geometry.stride,
        geometry.padding,
        geometry.dilation,
    )
    y = y if residual is None else y + residual
    return y.relu() if relu else y


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.kernel}{g.stride}")
@pytest.mark.parametrize("size", [(5, 4), (4, 7), (9, 18), (11, 11)])
@pytest.mark.usefixtures("each_level")
def test_every_geometry(by_images, geometry, size):
    if min(geometry.output(*size)) < 1:
        pytest.skip("the kernel does not fit the image")
    x, weight, bias = (
        torch.randn(3, 5, *size),
        sparse_weight(19, 5, *geometry.kernel),
        torch.randn(19),
    )
    layer = SparseConv2d(weight, bias, geometry, by_images=by_images)
    check_packed(layer.packed)
    assert relative_error(layer(x), reference(x, weight, bias, geometry)) < 2e-6


@pytest.mark.parametrize("geometry", GEOMETRIES[:4], ids=lambda g: f"{g.kernel}{g.stride}")
def test_every_width(geometry):
    weight = sparse_weight(6, 3, *geometry.kernel)
    layer = SparseConv2d(weight, None, geometry)
    for width in range(1, 70):
        x = torch.randn(2, 3, 5, width)
        assert relative_error(layer(x), reference(x, weight, None, geometry)) < 2e-6, width


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 15, 16, 17, 33])
@pytest.mark.usefixtures("each_level")
def test_every_remainder_of_images(by_images, batch):
    geometry = GEOMETRIES[1]
    x, weight = torch.randn(batch, 3, 5, 6), sparse_weight(7, 3, 3, 3)
    residual = torch.randn(batch, 7, 5, 6)
    layer = SparseConv2d(weight, None, geometry, by_images=by_images, relu=True)
    expected = reference(x, weight, None, geometry, residual, relu=True)
    assert relative_error(layer(x, residual), expected) < 2e-6


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.kernel}{g.stride}")
@pytest.mark.parametrize("batch", [0, 1, 17, 40])
def test_several_threads(by_images, geometry, batch):
    x, weight, bias = (
        torch.randn(batch, 3, 9, 7),
        sparse_weight(7, 3, *geometry.kernel),
        torch.ones(7),
    )
    layer = SparseConv2d(weight, bias, geometry, by_images=by_images)
    expected, before = reference(x, weight, bias, geometry), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        y = layer(x)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("channels", [1, 31, 32, 33, 70])
@pytest.mark.parametrize("layout", [PAIRS, QUAD_ROWS])
def test_every_remainder_of_channels(by_images, channels, layout):
    sparsity = 0.8 if layout == PAIRS else 0.3
    geometry = GEOMETRIES[1]
    x, weight = torch.randn(2, channels, 4, 4), sparse_weight(9, channels, 3, 3, sparsity=sparsity)
    layer = SparseConv2d(weight, None, geometry, by_images=by_images)
    assert relative_error(layer(x), reference(x, weight, None, geometry)) < 2e-6


def test_images_that_are_innermost_stay_so_through_elementwise_operators():
    geometry = GEOMETRIES[1]
    layer = SparseConv2d(sparse_weight(4, 4, 3, 3), None, geometry, by_images=True)
    y = layer(images_innermost(torch.randn(6, 4, 5, 5)))
    assert y.permute(2, 3, 1, 0).is_contiguous()
    assert (torch.relu(y) + y).permute(2, 3, 1, 0).is_contiguous()
    z = reference(y, layer_weight := sparse_weight(4, 4, 3, 3), None, geometry)
    assert relative_error(SparseConv2d(layer_weight, None, geometry, by_images=True)(y), z) < 2e-6


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("batch", [3, 16])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.usefixtures("each_level")
def test_a_nan_spreads_as_far_as_the_kernel(by_images, batch, relu):
    x, weight, geometry = torch.randn(batch, 2, 7, 9), torch.randn(5, 2, 3, 3), GEOMETRIES[1]
    x[1, 1, 3, 4] = float("nan")
    layer = SparseConv2d(weight, torch.randn(5), geometry, by_images=by_images, relu=relu)
    found = layer(x).isnan()
    assert torch.equal(found, reference(x, weight, None, geometry, relu=relu).isnan())
    assert int(found.sum()) == 5 * 9


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize("layout", [PAIRS, QUAD_ROWS])
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
@pytest.mark.usefixtures("each_level")
def test_what_is_not_finite_reaches_the_channels_that_use_it_alone(by_images, layout, sparsity):
    geometry, weight = GEOMETRIES[1], sparse_weight(19, 20, 3, 3, sparsity=sparsity)
    x = torch.randn(17, 20, 5, 6)
    x[3, 0, 0, 0] = x[5, 7, 2, 2] = x[16, 19, 4, 5] = float("inf")
    layer = SparseConv2d(weight, None, geometry, by_images=by_images)
    layer.packed = (
        pack_images(weight, geometry, layout=layout)
        if by_images
        else pack_linear(weight, layout=layout)
    )
    used = reference((~x.isfinite()).float(), (weight != 0).float(), None, geometry)
    assert torch.equal(~layer(x).isfinite(), used > 0)


@pytest.mark.parametrize("by_images", [False, True])
def test_a_bias_residual_or_input_that_does_not_fit_is_refused(by_images):
    weight, x = sparse_weight(4, 4, 3, 3), torch.randn(2, 4, 6, 6)
    layer = SparseConv2d(weight, None, GEOMETRIES[1], by_images=by_images)
    with pytest.raises(ValueError, match=r"residual is of shape \(5,\)"):
        layer(x, torch.zeros(5))
    numbers = [3, 3, 1, 1, 1, 1, 1, 1]
    with pytest.raises(ValueError, match=r"\(4, 6, 6\), not \(images, channels, rows, columns\)"):
        OPERATOR(x[0], layer.packed, None, None, 4, numbers, by_images, False)
    for bias in (torch.zeros(3), torch.zeros(4).double(), torch.zeros(1).expand(4)):
        layer.bias = bias
        with pytest.raises(ValueError, match=r"bias is of shape .* 4 values"):
            layer(x)


@pytest.mark.parametrize("by_images", [False, True])
@pytest.mark.parametrize(
    "numbers",
    [
        [3, 3, 1, 1, 1, 1, 1],
        [3, 3, 0, 1, 1, 1, 1, 1],
        [3, 3, 1, 0, 1, 1, 1, 1],
        [3, 3, 1, 1, 1, 1, 1, 0],
        [3, 3, 1, 1, -1, -1, 1, 1],
        [0, 3, 1, 1, 1, 1, 1, 1],
        [3, 3, 1, 1, 1, 1 << 60, 1, 1],
    ],
)
def test_a_geometry_that_is_none_is_refused(by_images, numbers):
    layer = SparseConv2d(sparse_weight(4, 4, 3, 3), None, GEOMETRIES[1], by_images=by_images)
    x = torch.randn(1, 4, 6, 6)
    with pytest.raises(ValueError, match=r"must have 8 numbers|must be in \[1, "):
        OPERATOR(x, layer.packed, None, None, 4, numbers, by_images, False)
    with pytest.raises(ValueError, match="kernel does not fit"):
        layer(torch.randn(1, 4, 6, 0))


def test_what_does_not_fit_is_refused():
    layer = SparseConv2d(sparse_weight(4, 4, 3, 3), None, GEOMETRIES[1])
    with pytest.raises(ValueError, match="from 5 channels to 4"):
        layer(torch.randn(1, 5, 6, 6))
    with pytest.raises(ValueError, match="too large"):
        pack_images(torch.ones(1, 1, 1, 80), Geometry((1, 80)))
