import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchcram import Chain, GlobalTopK, Quantize, compressible_weights
from torchcram.layers import LayerWeights
from torchcram.runtime.integers import find_integers

LAYERS = {
    "linear": lambda: nn.Linear(12, 5),
    "conv": lambda: nn.Conv2d(8, 6, 3),
    "grouped": lambda: nn.Conv2d(8, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv1d(4, 4, 3, groups=4),
    "transposed": lambda: nn.ConvTranspose2d(8, 6, 2),
    "transposed in groups": lambda: nn.ConvTranspose2d(8, 6, 2, groups=2),
}


def rebuilt(found):
    """q s, by what DequantizeLinear is defined to do."""
    scale = found.scale
    if found.block:
        scale = scale.repeat_interleave(found.block, found.axis)
    else:
        shape = [1] * found.values.dim()
        shape[found.axis] = -1
        scale = scale.view(shape)
    return found.values.float() * scale


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@settings(deadline=None, max_examples=25)
@given(st.integers(2, 8), st.sampled_from([None, 1, 2, 4]), st.integers(0, 999))
def test_they_give_back_the_weights_exactly(layer, bits, group_size, seed):
    torch.manual_seed(seed)
    weights = compressible_weights(nn.Sequential(layer()))
    weights["0.weight"].detach().mul_(10.0 ** torch.randint(-3, 4, ()).item())
    quantize = Quantize(bits, group_size)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # groups that do not fit
        quantize.compress_(weights)
    found = find_integers(weights, "0.weight", quantize)
    assert found.values.dtype == torch.int8
    assert found.values.abs().max() <= quantize.levels
    assert torch.equal(rebuilt(found), weights["0.weight"])


@pytest.mark.parametrize("bits", range(2, 9))
def test_scales_come_back_whatever_the_largest_weight(bits):
    largest = torch.arange(2**23, 2**24, 1013).float()  # mantissas
    weight = torch.stack([largest, largest / 3], 1).contiguous()
    weights = LayerWeights({"w": weight})
    Quantize(bits).compress_(weights)
    found = find_integers(weights, "w", Quantize(bits))
    assert torch.equal(found.scale, largest / Quantize(bits).levels)


@pytest.mark.parametrize("group_size", [None, 4])
def test_a_transpose_and_a_batch_of_one(group_size):
    weights = compressible_weights(nn.Sequential(nn.Linear(12, 5)))
    quantize = Quantize(4, group_size)
    quantize.compress_(weights)
    found = find_integers(weights, "0.weight", quantize).transposed().in_a_batch()
    assert torch.equal(rebuilt(found), weights["0.weight"].t().unsqueeze(0))


def test_rows_of_zeros_and_pruned_weights():
    weights = compressible_weights(nn.Sequential(nn.Linear(16, 8)))
    weights["0.weight"].detach()[3] = 0
    Chain(GlobalTopK(0.7), Quantize(3)).compress_(weights)
    found = find_integers(weights, "0.weight", Quantize(3))
    assert torch.equal(found.values == 0, weights["0.weight"] == 0)
    assert found.scale[3] == 1


@pytest.mark.parametrize("spoil", ["one value", "other bits", "not a number"])
def test_weights_that_are_off_the_grid_are_named(spoil):
    weights = compressible_weights(nn.Sequential(nn.Linear(16, 8)))
    Quantize(4).compress_(weights)
    if spoil == "one value":
        weights["0.weight"].detach()[2, 3] += 1e-6
    elif spoil == "not a number":
        weights["0.weight"].detach()[2, 3] = torch.nan
    bits = 3 if spoil == "other bits" else 4
    with pytest.raises(ValueError, match=r"'0\.weight' is not what int"):
        find_integers(weights, "0.weight", Quantize(bits))


def test_half_precision_is_refused():
    weights = compressible_weights(nn.Sequential(nn.Linear(16, 8)).bfloat16())
    with pytest.raises(ValueError, match=r"'0\.weight' is torch\.bfloat16"):
        find_integers(weights, "0.weight", Quantize(8))
