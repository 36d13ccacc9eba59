"""Sums over inputs, against what the layers themselves compute."""

import pytest
import torch
from torch import nn

from torchcram import compressible_weights
from torchcram.pruners import Calibration
from torchcram.pruners.activations import (
    as_matrices,
    from_matrices,
    products,
    square_sums,
)

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), (3, 4, 6)),
    "conv": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 7, 6)),
    "strided": (
        lambda: nn.Conv2d(4, 6, (3, 2), stride=2, padding=1, dilation=(1, 2)),
        (2, 4, 7, 6),
    ),
    "same": (lambda: nn.Conv2d(4, 6, 3, padding="same", dilation=2), (2, 4, 7, 6)),
    "reflected": (lambda: nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"), (2, 4, 7, 6)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (2, 4, 7, 6)),
    "depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4), (2, 4, 7, 6)),
    "channels last": (
        lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
        (2, 4, 7, 6),
    ),
    "one dimension": (lambda: nn.Conv1d(4, 6, 3, padding=1, stride=2, groups=2), (2, 4, 9)),
    "no batch": (lambda: nn.Conv2d(4, 6, 3), (4, 7, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_products_give_the_size_of_the_output_of_any_weight(kind):
    """||W X||^2 = tr W (X X^T) W^T, on two batches, whatever the layer does with its inputs."""
    make, shape = LAYERS[kind]
    layer = make().double()
    layer.bias = None
    batches = [torch.randn(shape, dtype=torch.float64) for _ in range(2)]
    weights = compressible_weights(layer)
    found = products(Calibration(layer, batches), weights)["weight"]
    w = as_matrices(weights, "weight", layer)
    expected = sum(layer(batch).square().sum() for batch in batches)
    assert torch.allclose((w @ found @ w.mT).diagonal(dim1=1, dim2=2).sum(), expected)
    squares = square_sums(Calibration(layer, batches), weights)["weight"]
    assert torch.allclose(squares, found.diagonal(dim1=1, dim2=2))
    assert torch.equal(from_matrices(weights, "weight", w), layer.weight)


def test_a_shared_weight_sums_over_all_its_uses():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    x = torch.randn(5, 4)
    found = square_sums(Calibration(model, [x]), compressible_weights(model))
    expected = x.square().sum(0) + first(x).square().sum(0)
    assert list(found) == ["0.weight"]
    assert torch.allclose(found["0.weight"][0].float(), expected)


def test_inputs_by_keyword_and_half_precision_are_summed_in_float32():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.fc(input=x)

    model, x = Net(), torch.randn(64, 4)
    found = products(Calibration(model, [{"x": x}]), compressible_weights(model))["fc.weight"]
    assert found.dtype is torch.float32
    assert torch.allclose(found[0], x.T @ x)


def test_the_fused_encoder_layer_of_torch_is_looked_into_but_for_its_attention():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    calibration = Calibration(layer, [torch.randn(2, 3, 8)])
    found = square_sums(calibration, compressible_weights(layer, only="linear"))
    assert list(found) == ["linear1.weight", "linear2.weight"]
    with pytest.raises(ValueError, match=r"no input reaches the layers of: self_attn.out_proj"):
        square_sums(calibration, compressible_weights(layer, skip="in_proj"))
