"""Layers of other kinds: Conv1D as Linear, by magnitude where inputs cannot be seen."""

import pytest
import torch
from nets import SequenceNet, images
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import NM, RowTopK, UniformTopK, compress, compressible_weights, sparsity
from torchcram.layers import some_of
from torchcram.pruners import Obs, SparseGPT, Wanda, prune_

SEEN = ["conv.weight", "fc.weight"]
PATTERNS = [UniformTopK(0.5), RowTopK(0.5), NM(2, 4)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("pruner", [Wanda, SparseGPT])
def test_conv1d_of_transformers_is_pruned_as_linear(pruner, pattern):
    conv = pytest.importorskip("transformers.pytorch_utils").Conv1D(6, 8)
    linear = nn.Linear(8, 6)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.T)
        conv.bias.copy_(linear.bias)
    batches = [torch.randn(16, 8) * torch.arange(1, 9) for _ in range(3)]
    masks = prune_(nn.Sequential(conv), pruner(pattern), batches)
    expected = prune_(nn.Sequential(linear), pruner(pattern), batches)
    assert torch.equal(masks["0.weight"].T, expected["0.weight"])
    torch.testing.assert_close(conv.weight.T, linear.weight)
    magnitude = pattern.select({"w": torch.randn(6, 8)})["w"]
    assert magnitude.sum() == expected["0.weight"].sum()


@pytest.mark.parametrize("pruner", [Wanda, SparseGPT])
def test_what_cannot_be_seen_is_pruned_by_magnitude_and_named(pruner):
    model, batches = SequenceNet(), [images()[0]]
    weights = compressible_weights(model)
    hidden = some_of(weights, [name for name in weights if name not in SEEN])
    by_magnitude = UniformTopK(0.7).select(hidden)
    plain = compress(model, "uniform:0.7")
    with pytest.warns(UserWarning, match="cannot see the inputs.*by magnitude: rnn.weight") as said:
        masks = prune_(model, pruner(UniformTopK(0.7)), batches)
    assert [warning.filename for warning in said] == [__file__]
    assert "rnn.weight_hh_l0, attention.in_proj_weight, attention.out_proj.weight, experts" in str(
        said[0].message
    )
    assert list(masks) == list(weights)
    for name, mask in by_magnitude.items():
        assert torch.equal(masks[name], mask), name
        assert torch.equal(weights[name], plain.get_parameter(name)), name
    for name in SEEN:
        assert not torch.equal(weights[name], plain.get_parameter(name)), name
    assert sparsity(weights) == pytest.approx(0.7, abs=0.01)
    prune_(SequenceNet(), pruner(UniformTopK(0.7)), batches)  # said once


def test_gradients_reach_all_of_them():
    model = SequenceNet()
    before = {name: w.detach().clone() for name, w in compressible_weights(model).items()}
    masks = prune_(
        model,
        Obs(UniformTopK(0.5), gradients=8, recomputations=2, damping=1e-4),
        [images() for _ in range(8)],
        loss=lambda model, batch: cross_entropy(model(batch[0]), batch[1]),
    )
    assert list(masks) == list(before)
    for name, mask in masks.items():
        weight = model.get_parameter(name)
        assert not weight[~mask].any(), name
        assert not torch.equal(weight[mask], before[name][mask]), name
    thirds = masks["attention.in_proj_weight"].chunk(3)
    assert [int(third.sum()) for third in thirds] == [32, 32, 32]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gradients_of_recurrent_layers_on_a_gpu():
    model = SequenceNet().cuda()
    enabled = torch.backends.cudnn.enabled
    masks = prune_(
        model,
        Obs(UniformTopK(0.5), gradients=4, recomputations=1),
        [images() for _ in range(4)],
        loss=lambda model, batch: cross_entropy(model(batch[0].cuda()), batch[1].cuda()),
    )
    assert int(masks["rnn.weight_hh_l0"].sum()) == 128
    assert torch.backends.cudnn.enabled is enabled
