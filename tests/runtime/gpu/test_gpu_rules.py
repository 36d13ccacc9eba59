import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from torchcram import NM, Quantize, compressible_weights
from torchcram.runtime.gpu.layers import (
    Int8Linear,
    PointwiseConv2d,
    four_bit_codes,
    int4_group,
    int4_tiles,
    is_two_of_four,
    scales_and_zeros,
    why_not_int4,
    why_not_int8,
    why_not_pointwise,
    why_not_sparse,
)
from torchcram.runtime.integers import find_integers

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def two_of_four(outputs, inputs):
    weight = torch.randn(outputs, inputs)
    NM(2, 4).compress_({"w": weight})
    return weight


def quantized(outputs, inputs, quantize):
    weights = compressible_weights(nn.Sequential(nn.Linear(inputs, outputs)))
    quantize.compress_(weights)
    return weights["0.weight"].detach(), find_integers(weights, "0.weight", quantize)


def test_two_of_four_is_seen():
    weight = two_of_four(8, 16)
    assert is_two_of_four(weight)
    assert is_two_of_four(torch.zeros(8, 16))
    weight[3, 4:8] = torch.tensor([1.0, 1.0, 1.0, 0.0])
    assert not is_two_of_four(weight)
    assert not is_two_of_four(two_of_four(8, 16)[:, :14])
    across = torch.tensor([[0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]])  # of two groups
    assert is_two_of_four(across)


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((64, 128), BF16, None),
        ((32, 64), FP16, None),
        ((64, 128), FP32, "2:4 is for bfloat16 and float16, not float32"),
        ((2, 128), BF16, "2:4 needs a multiple of 32 outputs, not 2"),
        ((64, 100), BF16, "2:4 needs a multiple of 64 inputs, not 100"),
    ],
)
def test_why_a_layer_cannot_be_semi_structured(shape, dtype, reason):
    assert why_not_sparse(two_of_four(*shape), dtype) == reason


def test_a_dense_layer_is_not_two_of_four():
    assert why_not_sparse(torch.randn(64, 128), BF16) == "not 2:4"


@pytest.mark.parametrize(
    ("quantize", "dtype", "reason"),
    [
        (Quantize(8), BF16, None),
        (Quantize(3), FP16, None),
        (Quantize(8), FP32, "int8 is for bfloat16 and float16, not float32"),
        (Quantize(8, 32), BF16, "int8 needs one scale per output, not per group"),
    ],
)
def test_why_a_layer_cannot_be_int8(quantize, dtype, reason):
    assert why_not_int8(quantized(16, 64, quantize)[1], dtype) == reason


@pytest.mark.parametrize(
    ("shape", "quantize", "dtype", "reason"),
    [
        ((16, 64), Quantize(4), BF16, None),
        ((16, 64), Quantize(3, 32), BF16, None),
        ((16, 64), Quantize(4), FP16, "int4 is for bfloat16, not float16"),
        ((16, 64), Quantize(5), BF16, "more than 4 bits"),
        ((16, 64), Quantize(4, 16), BF16, "int4 needs groups of a multiple of 32 inputs, not 16"),
        ((12, 64), Quantize(4), BF16, "int4 needs a multiple of 8 outputs, not 12"),
        ((16, 48), Quantize(4), BF16, "int4 needs a multiple of 32 inputs, not 48"),
    ],
)
def test_why_a_layer_cannot_be_int4(shape, quantize, dtype, reason):
    assert why_not_int4(quantized(*shape, quantize)[1], dtype) == reason


def test_groups_and_tiles_divide_the_inputs():
    assert [int4_group(size) for size in (512, 384, 64, 96, 16)] == [256, 128, 64, 32, None]
    assert [int4_tiles(inputs) for inputs in (768, 192, 96)] == [8, 4, 2]


@pytest.mark.parametrize("group_size", [None, 128, 32])
def test_codes_scales_and_zeros_stand_for_the_weight(group_size):
    weight, integers = quantized(16, 256, Quantize(4, group_size))
    group = int4_group(group_size or 256)
    codes, table = four_bit_codes(integers.values), scales_and_zeros(integers, group)
    assert codes.shape == (16, 128)
    assert table.shape == (256 // group, 16, 2)
    assert table.dtype == BF16
    unpacked = torch.stack([codes >> 4, codes & 15], 2).flatten(1).float()
    scale, zero = (part.t().repeat_interleave(group, 1).float() for part in table.unbind(2))
    rebuilt = (unpacked - 8) * scale + zero
    torch.testing.assert_close(rebuilt, weight, rtol=2**-8, atol=0)


def test_int8_layers_compute_what_dense_ones_do():
    weight, integers = quantized(16, 64, Quantize(8))
    bias = torch.randn(16)
    x = torch.randn(2, 5, 64)
    found = Int8Linear(integers, bias)(x)
    torch.testing.assert_close(found, nn.functional.linear(x, weight, bias), rtol=1e-4, atol=1e-5)


def test_int8_layers_take_our_kernel_for_few_rows(monkeypatch):
    weight, integers = quantized(16, 64, Quantize(8))
    layer = Int8Linear(integers, torch.randn(16).half())
    seen = []

    class Kernels:
        MOST_ROWS = 10

        @staticmethod
        def multiply_int8(x, values, scale, bias):
            seen.append(x.shape)
            assert x.is_contiguous()
            return (x.float() @ values.float().t() * scale + bias).to(x.dtype)

    class OnGpu(torch.Tensor):
        is_cuda = True

    monkeypatch.setattr("torchcram.runtime.gpu.layers.cuda_kernels", lambda: Kernels)
    for shape, few in (((2, 5, 64), True), ((64, 10), True), ((11, 64), False), ((0, 64), True)):
        x = torch.randn(shape).half()
        x = x.t() if shape == (64, 10) else x
        found = layer(x.as_subclass(OnGpu)).as_subclass(torch.Tensor)
        expected = nn.functional.linear(x.float(), weight, layer.bias.float())
        assert found.shape == expected.shape
        torch.testing.assert_close(found.float(), expected, rtol=0.02, atol=0.02)
        assert bool(seen) == few
        seen.clear()


sizes = st.integers(1, 5)


@given(
    shape=st.tuples(sizes, sizes, sizes, sizes),
    outputs=sizes,
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels_last=st.booleans(),
    batched=st.booleans(),
)
@torch.no_grad()
def test_a_linear_layer_computes_a_pointwise_convolution(
    shape, outputs, stride, channels_last, batched
):
    x = torch.randn(shape)
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    x = x if batched else x[0]
    conv = nn.Conv2d(shape[1], outputs, 1, stride=stride)
    assert why_not_pointwise(conv) is None
    linear = nn.Linear(shape[1], outputs)
    linear.weight.copy_(conv.weight.flatten(1))
    linear.bias.copy_(conv.bias)
    found = PointwiseConv2d(linear, conv.stride)(x)
    torch.testing.assert_close(found, conv(x))
    adjacent = x.stride(-3) == 1
    assert found.movedim(-3, -1).is_contiguous() if adjacent else found.is_contiguous()


class Transposed(nn.Linear):
    """Writes its outputs as 2:4 kernels do: those of all rows one after another."""

    def forward(self, x):
        return super().forward(x).movedim(-1, 0).contiguous().movedim(0, -1)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_outputs_have_the_format_of_the_input(form):
    layer = PointwiseConv2d(Transposed(8, 4))
    found = layer(torch.randn(2, 8, 5, 3).to(memory_format=form))
    assert found.is_contiguous(memory_format=form)
    if form == torch.contiguous_format:
        assert found.view(2, -1).shape == (2, 60)


@pytest.mark.parametrize(
    ("conv", "reason"),
    [
        (nn.Conv2d(8, 8, (3, 1)), "there is a kernel for convolutions of 1x1, not 3x1"),
        (nn.Conv2d(8, 8, 1, groups=2), "there is a kernel for one group of channels, not 2"),
        (nn.Conv2d(8, 8, 1, padding=1), "there is a kernel for convolutions without padding only"),
        (nn.Conv2d(8, 8, 1, padding="same"), None),
        (nn.Conv2d(8, 8, 1, padding="valid"), None),
    ],
)
def test_why_a_convolution_is_not_pointwise(conv, reason):
    assert why_not_pointwise(conv) == reason
