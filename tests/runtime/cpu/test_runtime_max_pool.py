"""Max pooling by the kernel: the values of torch, bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native_library import needs_kernels
from torch import nn
from torch.nn import functional

from torchcram.runtime import prepare
from torchcram.runtime.cpu.fuse import FastMaxPool2d

pytestmark = needs_kernels

max_pool = torch.ops.torchcram.max_pool2d
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])


@st.composite
def poolings(draw):
    kernel = draw(st.tuples(st.integers(1, 7), st.integers(1, 20)))
    stride = draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    padding = tuple(draw(st.integers(0, size // 2)) for size in kernel)
    least = (max(1, k - 2 * p) for k, p in zip(kernel, padding, strict=True))
    size = tuple(draw(st.integers(side, 50)) for side in least)
    return size, kernel, stride, padding


@given(poolings(), st.integers(1, 3), st.integers(1, 3), st.booleans())
@pytest.mark.usefixtures("each_level")
def test_every_window(pooling, images, channels, special):
    size, *window = pooling
    x = torch.randn(images, channels, *size)
    if special:
        some = torch.rand(x.shape) < 0.1
        x[some] = SPECIAL[torch.randint(len(SPECIAL), (int(some.sum()),))]
    expected = functional.max_pool2d(x, *window)
    assert torch.equal(max_pool(x, *window).nan_to_num(3e38), expected.nan_to_num(3e38))


def test_no_image():
    assert max_pool(torch.randn(0, 3, 8, 8), [2, 2], [2, 2], [0, 0]).shape == (0, 3, 4, 4)


@pytest.mark.parametrize(
    ("x", "window", "message"),
    [
        (torch.randn(2, 8, 8), ([2, 2], [2, 2], [0, 0]), "not .images"),
        (torch.randn(1, 2, 8, 8).double(), ([2, 2], [2, 2], [0, 0]), "need float32"),
        (torch.randn(1, 2, 8, 8), ([2, 2], [2, 2], [2, 0]), "at most half"),
        (torch.randn(1, 2, 8, 8), ([9, 2], [2, 2], [0, 0]), "do not fit"),
        (torch.randn(1, 2, 8, 8), ([2, 2], [0, 2], [0, 0]), "must be in"),
        (torch.randn(1, 2, 0, 8), ([2, 2], [1, 1], [1, 1]), "do not fit images of 0 x 8"),
        (torch.randn(1, 2, 8, 0), ([2, 2], [1, 1], [1, 1]), "do not fit images of 8 x 0"),
    ],
)
def test_what_cannot_be_pooled_is_refused(x, window, message):
    with pytest.raises(ValueError, match=message):
        max_pool(x, *window)


def test_torch_can_compile_and_differentiate_it():
    x = torch.randn(1, 2, 6, 6, requires_grad=True)
    window = ([3, 3], [2, 2], [1, 1])
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(max_pool.default, (x.detach(), *window), test_utils=checks)
    (actual,) = torch.autograd.grad(max_pool(x, *window).sum(), x)
    (expected,) = torch.autograd.grad(functional.max_pool2d(x, *window).sum(), x)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 3, 8, 8),
        torch.randn(2, 3, 8, 8).contiguous(memory_format=torch.channels_last),
        torch.randn(2, 3, 8, 8).double(),
        torch.randn(3, 8, 8),
        torch.randn(0, 3, 8, 8),
    ],
)
def test_the_layer_takes_what_that_of_torch_takes(x):
    layer = nn.MaxPool2d(3, (2, 1), padding=1)
    assert torch.equal(FastMaxPool2d(layer)(x), layer(x))


@pytest.mark.usefixtures("sparse_wins")
@pytest.mark.parametrize(
    ("layer", "fast"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d(3, 2, 1), True),
        (nn.MaxPool2d(3, dilation=2), False),
        (nn.MaxPool2d(2, ceil_mode=True), False),
    ],
)
def test_prepared_models_pool_by_the_kernel(layer, fast):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer, nn.Flatten()).eval()
    x = torch.randn(2, 3, 11, 11)
    prepared = prepare(model, x)
    assert any(isinstance(module, FastMaxPool2d) for module in prepared.modules()) == fast
    assert torch.allclose(prepared(x), model(x), atol=1e-6)
