import pytest
import torch
from nets import ConvNet, images, mlp
from torch import nn

from torchcram import NM, GlobalTopK, RowTopK, UniformTopK, compressible_weights
from torchcram.pruners import Wanda, prune_


@pytest.mark.parametrize("pattern", [RowTopK(0.5), UniformTopK(0.6), GlobalTopK(0.7), NM(2, 4)])
def test_it_keeps_what_the_formula_by_hand_keeps(pattern):
    model = mlp()
    batches = [(torch.randn(5, 8) * torch.arange(8), "label") for _ in range(3)]
    x = torch.cat([batch[0] for batch in batches])
    hidden = torch.relu(model[0](x))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    scores = {
        "0.weight": model[0].weight.abs() * x.norm(dim=0),
        "2.weight": model[2].weight.abs() * hidden.norm(dim=0),
    }
    expected = pattern.select(scores)
    masks = prune_(model, Wanda(pattern), batches)
    for name, mask in expected.items():
        assert torch.equal(masks[name], mask)
        assert torch.equal(model.get_parameter(name), before[name].masked_fill(~mask, 0))
    assert torch.equal(model[0].bias, before["0.bias"])


def test_a_convolution_is_scored_by_the_patches_it_sees():
    layer = nn.Conv2d(4, 6, 3, groups=2)
    x = torch.randn(2, 4, 6, 6)
    patches = nn.functional.unfold(x, 3).transpose(0, 1).flatten(1)  # (channels x 9, all places)
    norms = patches.norm(dim=1).view(2, 1, 2, 3, 3)  # by group
    scores = (layer.weight.view(2, 3, 2, 3, 3).abs() * norms).view(6, 2, 3, 3)
    expected = UniformTopK(0.5).select({"weight": scores})["weight"]
    assert torch.equal(prune_(layer, "wanda@uniform:0.5", [x])["weight"], expected)


@pytest.mark.parametrize("pattern", [GlobalTopK(0.73), UniformTopK(0.73), NM(2, 4)], ids=str)
def test_counts_are_exact(pattern):
    model = ConvNet()
    weights = compressible_weights(model, skip="unused|up")
    masks = prune_(model, Wanda(pattern), [images()], weights=weights)
    total = sum(weight.numel() for weight in weights.values())
    share = 0.5 if isinstance(pattern, NM) else 0.73
    dropped = [int((~masks[name]).sum()) for name in weights]
    if isinstance(pattern, UniformTopK):
        assert dropped == [round(share * weight.numel()) for weight in weights.values()]
    assert sum(dropped) == round(share * total)


def test_bfloat16_is_ranked_in_float32():
    class Stored(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x.float(), self.weight.float())

    model = Stored(64, 8, bias=False).bfloat16()
    x = (1 + torch.rand(16, 64)).bfloat16()
    scores = model.weight.float().abs() * x.float().norm(dim=0)
    expected = RowTopK(0.5).select({"weight": scores})["weight"]
    assert torch.equal(prune_(model, "wanda@row:0.5", [x])["weight"], expected)
