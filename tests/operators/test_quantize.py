import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchcram import NM, Chain, GlobalTopK, Quantize, compressible_weights
from torchcram.operators.quantize import quantizer_of


def by_formula(row, bits):
    """Round to nearest on a symmetric grid of 2^(b-1) - 1 steps to either side."""
    levels = 2 ** (bits - 1) - 1
    scale = max(abs(float(x)) for x in row) / levels
    return torch.tensor([round(float(x) / scale) * scale if scale else 0.0 for x in row])


@settings(deadline=None)
@given(st.integers(2, 8), st.integers(0, 99))
def test_linear_per_output_channel(bits, seed):
    weight = torch.randn(4, 10, generator=torch.Generator().manual_seed(seed))
    expected = torch.stack([by_formula(row, bits) for row in weight])
    assert Quantize(bits).compress_({"w": weight}) is None
    torch.testing.assert_close(weight, expected)
    for row in weight:
        assert len(row.unique()) <= 2**bits - 1


def test_groups_along_the_inputs():
    weight = torch.randn(3, 12)
    expected = torch.cat(
        [torch.stack([by_formula(r, 4) for r in part]) for part in weight.split(4, 1)], 1
    )
    Quantize(4, 4).compress_({"w": weight})
    torch.testing.assert_close(weight, expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_convolutions_scale_per_output_channel(transposed):
    layer = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 6, 3)
    before = layer.weight.detach().clone()
    Quantize(4).compress_(compressible_weights(nn.Sequential(layer)))
    dim = 1 if transposed else 0
    for old, new in zip(before.unbind(dim), layer.weight.detach().unbind(dim), strict=True):
        torch.testing.assert_close(new.reshape(-1), by_formula(old.reshape(-1), 4))


def test_convolution_groups_run_over_input_channels():
    layer = nn.Conv2d(8, 2, 3)
    before = layer.weight.detach().clone()
    Quantize(3, 4).compress_(compressible_weights(nn.Sequential(layer)))
    torch.testing.assert_close(
        layer.weight[1, 4:, 2, 0].detach(), by_formula(before[1, 4:, 2, 0], 3)
    )


def test_a_layer_that_groups_do_not_fit_is_named_and_scaled_whole():
    weight = torch.randn(2, 10)
    whole = weight.clone()
    Quantize(4).compress_({"odd": whole})
    with pytest.warns(UserWarning, match="int4:g4 takes one scale per output channel.*odd"):
        Quantize(4, 4).compress_({"odd": weight})
    assert torch.equal(weight, whole)


def test_zero_channels_stay_zero_and_twice_is_once():
    weight = torch.randn(4, 8)
    weight[2] = 0
    Quantize(4).compress_({"w": weight})
    once = weight.clone()
    assert torch.equal(once[2], torch.zeros(8))
    Quantize(4).compress_({"w": weight})
    torch.testing.assert_close(weight, once)


def test_bfloat16_is_rounded_in_float32():
    weight = torch.randn(4, 8)
    rounded = weight.bfloat16()
    exact = rounded.float()
    Quantize(8).compress_({"w": exact})
    Quantize(8).compress_({"w": rounded})
    assert torch.equal(rounded, exact.bfloat16())


def test_pruning_then_quantizing_keeps_the_mask():
    weights = {"a": torch.randn(8, 8), "b": torch.randn(4, 8)}
    masks = Chain(GlobalTopK(0.75), Quantize(8)).compress_(weights)
    assert sum(int(mask.sum()) for mask in masks.values()) == 24
    assert all((weights[name][~mask] == 0).all() for name, mask in masks.items())


@pytest.mark.parametrize(
    "bad", [{"bits": 1}, {"bits": 9}, {"bits": 4.0}, {"bits": 4, "group_size": 0}]
)
def test_bad_values_are_refused(bad):
    with pytest.raises(ValueError, match="Quantize"):
        Quantize(**bad)


def test_depthwise_transposed_convolutions_scale_per_output_channel_too():
    layer = nn.ConvTranspose2d(8, 8, 3, groups=8)
    with torch.no_grad():
        layer.weight.mul_(10.0 ** -torch.arange(8.0).view(8, 1, 1, 1))
    before = layer.weight.detach().clone()
    Quantize(4).compress_(compressible_weights(nn.Sequential(layer)))
    for old, new in zip(before, layer.weight.detach(), strict=True):
        torch.testing.assert_close(new.reshape(-1), by_formula(old.reshape(-1), 4))


@pytest.mark.parametrize("shape", [(4, 0), (0, 4), (0, 0), (3, 0, 2, 2), (3, 2, 0)])
@pytest.mark.parametrize("size", [None, 4])
def test_empty_weights_stay_as_they_are(shape, size):
    weights = {"empty": torch.empty(shape), "w": torch.randn(3, 8)}
    before = weights["w"].clone()
    assert Quantize(4, size).compress_(weights) is None
    assert weights["empty"].shape == shape
    assert not torch.equal(weights["w"], before)


def test_the_last_quantizer_of_a_chain_counts():
    chain = Chain(Chain(Quantize(8), NM(2, 4)), Quantize(4, 16))
    assert quantizer_of(chain) == Quantize(4, 16)
    assert quantizer_of(Chain(Quantize(8), NM(2, 4))) == Quantize(8)
    assert quantizer_of(Chain(GlobalTopK(0.5), NM(2, 4))) is None
    assert quantizer_of(None) is None
