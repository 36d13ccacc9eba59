"""Layer-wise reconstruction: error, counts, order."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import mlp
from torch import nn

from torchcram import NM, Chain, GlobalTopK, Quantize, RowTopK, UniformTopK, compress_, sparsity
from torchcram.pruners import SparseGPT, bind, prune_


def correlated(samples, inputs, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(inputs, inputs, generator=generator, dtype=dtype)
    return torch.randn(samples, inputs, generator=generator, dtype=dtype) @ mix


def pruned(layer, operator, x):
    """The weight after `operator`; the layer stays as it is."""
    twin = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=layer.weight.dtype)
    twin.load_state_dict(layer.state_dict())
    prune_(twin, operator, [x])
    return twin.weight.detach()


def error(layer, weight, x):
    return float((x @ (layer.weight.detach() - weight).T).square().sum())


@pytest.mark.parametrize("pattern", [UniformTopK(0.5), RowTopK(0.7), NM(2, 4)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_the_outputs_change_less_than_by_magnitude_and_by_wanda(pattern, seed):
    torch.manual_seed(seed)
    layer, x = nn.Linear(48, 16, bias=False), correlated(300, 48, seed)
    ours = error(layer, pruned(layer, SparseGPT(pattern, block=8), x), x)
    assert ours < 0.85 * error(layer, pruned(layer, pattern, x), x)
    assert ours < 0.85 * error(layer, pruned(layer, f"wanda@{pattern}", x), x)


def test_it_comes_near_the_least_squares_for_its_mask():
    layer = nn.Linear(32, 8, bias=False, dtype=torch.float64)
    x = correlated(400, 32, 0, torch.float64)
    once = pruned(layer, SparseGPT(UniformTopK(0.5), damping=1e-6, block=8), x)
    best = torch.zeros_like(once)
    for row in range(8):
        kept = once[row] != 0
        outputs = x @ layer.weight[row].detach()
        best[row, kept] = torch.linalg.lstsq(x[:, kept], outputs[:, None]).solution.flatten()
    masked = layer.weight.detach().masked_fill(once == 0, 0)
    lost = [error(layer, weight, x) for weight in (best, once, masked)]
    assert lost[0] <= lost[1] < 0.5 * lost[2]
    assert lost[1] - lost[0] < 0.3 * (lost[2] - lost[0]), lost


def test_with_only_the_first_column_dropped_it_is_the_least_squares():
    x = correlated(400, 6, 0, torch.float64)
    layer = nn.Linear(6, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1e-3, 5.0, 5.0, 5.0, 5.0, 5.0]]))
    found = pruned(layer, SparseGPT(UniformTopK(1 / 6), damping=1e-9), x)
    assert found[0, 0] == 0
    best = torch.linalg.lstsq(x[:, 1:], (x @ layer.weight[0].detach())[:, None]).solution.flatten()
    assert torch.allclose(found[0, 1:], best, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.integers(1, 9),
    inputs=st.integers(1, 30),
    level=st.floats(0, 1, exclude_max=True),
    block=st.integers(1, 40),
    rows=st.booleans(),
)
def test_counts_are_exact_whatever_the_block(outputs, inputs, level, block, rows):
    layer = nn.Linear(inputs, outputs, bias=False)
    x = correlated(20, inputs, 0)
    pattern = RowTopK(level) if rows else UniformTopK(level)
    masks = prune_(layer, SparseGPT(pattern, block=block), [x])
    mask = masks["weight"]
    if rows:
        assert mask.sum(1).tolist() == [inputs - round(level * inputs)] * outputs
    else:
        assert int(mask.sum()) == outputs * inputs - round(level * outputs * inputs)
    assert int(torch.count_nonzero(layer.weight[~mask])) == 0


@pytest.mark.parametrize("block", [4, 6, 128])
def test_n_of_m_is_valid_whatever_the_block(block):
    layer = nn.Linear(24, 8)
    mask = prune_(layer, SparseGPT(NM(2, 4), block=block), [correlated(50, 24, 0)])["weight"]
    assert bool((mask.unflatten(1, (-1, 4)).sum(-1) == 2).all())
    assert torch.equal(layer.weight != 0, mask)


def test_convolutions_with_groups_are_reconstructed_along_their_channels():
    layer = nn.Conv2d(16, 6, 3, groups=2, padding=1, bias=False)
    x = correlated(6 * 25, 16, 0).view(6, 5, 5, 16).movedim(-1, 1)
    before = layer(x).detach()
    start = layer.weight.detach().clone()
    lost = []
    for operator in ("sparsegpt@nm:2:4", "nm:2:4"):
        with torch.no_grad():
            layer.weight.copy_(start)
        mask = prune_(layer, operator, [x])["weight"]
        assert bool((mask.unflatten(1, (-1, 4)).sum(2) == 2).all())
        lost.append(float((layer(x).detach() - before).square().sum()))
    assert lost[0] < 0.6 * lost[1]


def test_layers_get_the_inputs_that_pruned_layers_before_them_give():
    model = mlp()
    x = correlated(100, 8, 0)
    prune_(model, "sparsegpt@uniform:0.5", [x])
    # the last layer alone, on what the pruned first layer gives
    torch.manual_seed(0)
    twin = mlp()
    for got, want in zip(model.parameters(), twin.parameters(), strict=True):
        got.data, want.data = want.data.clone(), got.data.clone()  # model: dense, twin: pruned
    expected = twin[2].weight.detach().clone()
    with torch.no_grad():
        twin[2].weight.copy_(model[2].weight)
    prune_(twin, "sparsegpt@uniform:0.5", [x], weights={"2.weight": twin[2].weight})
    assert torch.equal(twin[2].weight, expected)


def test_a_layer_whose_inputs_are_no_multiple_is_left_dense_and_named():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    before = model[0].weight.detach().clone()
    with pytest.warns(UserWarning, match=r"leaves dense.*0\.weight"):
        masks = prune_(model, SparseGPT(NM(1, 4)), [torch.randn(20, 6)])
    assert torch.equal(model[0].weight, before)
    assert bool(masks["0.weight"].all())
    assert int(masks["1.weight"].sum()) == 8


@pytest.mark.parametrize("dead", ["some", "all"])
def test_inputs_that_are_always_zero_do_no_harm(dead):
    layer, x = nn.Linear(8, 4), torch.randn(30, 8)
    x[:, 2 if dead == "some" else slice(None)] = 0
    start = layer.weight.detach().clone()
    mask = prune_(layer, "sparsegpt@uniform:0.5", [x])["weight"]
    assert int(mask.sum()) == 16
    if dead == "all":
        assert torch.equal(layer.weight, start.masked_fill(~mask, 0))
        assert torch.equal(mask, UniformTopK(0.5).select({"w": start})["w"])
    else:
        assert not bool(mask[:, 2].any())


def test_quantizing_afterwards_keeps_the_mask():
    layer, x = nn.Linear(16, 8), correlated(50, 16, 0)
    operator = Chain(bind(SparseGPT(NM(2, 4)), layer, [x]), Quantize(4))
    assert str(operator) == "sparsegpt@nm:2:4+int4"
    masks = compress_(layer, operator)
    assert int(masks["weight"].sum()) == 64
    assert sparsity({"w": layer.weight}) >= 0.5
    assert max(len(row.unique()) for row in layer.weight) <= 15


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ValueError, match=r"global:0\.5 is impossible.*uniform, row and nm"):
        SparseGPT(GlobalTopK(0.5))
    with pytest.raises(ValueError, match="damping is 0"):
        SparseGPT(UniformTopK(0.5), damping=0)
    with pytest.raises(ValueError, match="block is 0"):
        SparseGPT(UniformTopK(0.5), block=0)
