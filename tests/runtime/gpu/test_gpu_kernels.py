"""On a GPU: kernels compute what dense layers do, and models stay what they are."""

import pytest
import torch
from torch import nn

from torchcram import compress, compressible_weights, parse_operator
from torchcram.operators.quantize import quantizer_of
from torchcram.runtime.gpu import prepare as gpu_prepare
from torchcram.runtime.gpu import prepare_gpu
from torchcram.runtime.gpu.layers import PointwiseConv2d
from torchcram.runtime.gpu.prepare import (
    Chooser,
    Input,
    agree,
    gpu_milliseconds,
    kernels_for,
)
from torchcram.runtime.integers import find_integers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("rows", [1, 7, 64, 384])
@pytest.mark.parametrize(
    ("operator", "kernel", "dtype"),
    [
        ("nm:2:4", "2:4", torch.bfloat16),
        ("nm:2:4", "2:4", torch.float16),
        ("int8", "int8", torch.bfloat16),
        ("int8", "int8", torch.float16),
        ("int4", "int4", torch.bfloat16),
        ("int4:g64", "int4", torch.bfloat16),
        ("nm:2:4+int4:g128", "int4", torch.bfloat16),
    ],
)
@torch.no_grad()
def test_kernels_compute_what_dense_layers_do(rows, operator, kernel, dtype):
    model = compress(nn.Sequential(nn.Linear(512, 256)), operator).cuda()
    quantize = quantizer_of(parse_operator(operator))
    weights = compressible_weights(model)
    integers = None if quantize is None else find_integers(weights, "0.weight", quantize)
    layer = model.to(dtype)[0]
    made = kernels_for(layer, integers)[kernel]
    assert made.why_not is None
    x = torch.randn(2, rows, 512, device="cuda", dtype=dtype)
    found = made.make()(x)
    assert found.shape == (2, rows, 256)
    assert agree(found, layer(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("channels_last", [False, True])
@torch.no_grad()
def test_pointwise_convolutions_compute_what_dense_ones_do(channels_last, stride, dtype):
    model = compress(nn.Sequential(nn.Conv2d(512, 256, 1, stride=stride)), "nm:2:4")
    layer = model.cuda().to(dtype)[0]
    x = Input((3, 512, 14, 9), channels_last).like(layer.weight)
    made = kernels_for(layer, None)["2:4"]
    assert made.why_not is None
    assert agree(made.make()(x), layer(x))


class Flat(nn.Sequential):
    def forward(self, x):
        return super().forward(x).view(len(x), -1)  # fails in channels_last


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_a_prepared_convolutional_model_gives_what_it_gave(form, monkeypatch):
    monkeypatch.setattr(gpu_prepare, "LEAST", 0.0)  # the layer is replaced, fast or not
    kind = Flat if form == torch.contiguous_format else nn.Sequential
    model = kind(nn.Conv2d(64, 256, 3), nn.ReLU(), nn.Conv2d(256, 128, 1), nn.ReLU())
    model, x = compress(model, "nm:2:4"), torch.randn(8, 64, 30, 30)
    model, x = model.to(memory_format=form), x.to(memory_format=form)
    fast, layers, _ = prepare_gpu(model, (x,), operator="nm:2:4")
    assert [layer.kernel for layer in layers] == ["dense", "2:4"]
    assert layers[0].reason == "there is a kernel for convolutions of 1x1, not 3x3"
    assert isinstance(fast[2], PointwiseConv2d)
    x = x.cuda().bfloat16()
    assert agree(fast(x), model.cuda().bfloat16()(x))


def test_a_large_two_of_four_layer_is_measured():
    layer = compress(nn.Sequential(nn.Linear(8192, 8192)), "nm:2:4").cuda().half()[0]
    choice, faster = Chooser().choose("fc", layer, Input((8192, 8192)), integers=None)
    assert choice.speedup is not None
    assert (faster is None) == (choice.kernel == "dense")


@pytest.mark.parametrize("operator", ["nm:2:4", "int8", "int4:g128", "nm:2:4+int4"])
@torch.no_grad()
def test_a_prepared_model_gives_what_it_gave(operator):
    model = nn.Sequential(
        nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 3)
    )
    model = compress(model, operator)
    x = torch.randn(4096, 1024)
    fast, layers, _ = prepare_gpu(model, (x,), operator=operator)
    assert [layer.name for layer in layers] == ["0", "2", "4"]
    if operator == "nm:2:4":
        assert layers[2].reason == "2:4 needs a multiple of 32 outputs, not 3; not quantized"
    expected = model.cuda().bfloat16()(x.cuda().bfloat16())
    assert agree(fast(x.cuda().bfloat16()), expected)
    assert type(model[0]) is nn.Linear


def test_a_longer_call_takes_longer():
    x, y = (torch.randn(size, size, device="cuda") for size in (256, 2048))
    assert gpu_milliseconds([lambda: x @ x]) < gpu_milliseconds([lambda: y @ y])
