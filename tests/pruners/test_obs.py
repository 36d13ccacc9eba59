"""Second-order pruning on problems whose answer is known."""

import pytest
import torch
from nets import ConvNet, images, snapshot
from torch import nn
from torch.nn.functional import cross_entropy

from torchcram import (
    NM,
    GlobalTopK,
    RowTopK,
    Sparsifier,
    UniformTopK,
    compress_,
    compressible_weights,
)
from torchcram.pruners import Obs, bind, prune_
from torchcram.pruners.obs import steps

INPUTS = 12
SAMPLES = 1000


def regression(seed):
    """A linear model at its optimum: noise of -1 and 1 makes F the Hessian, X^T X / n."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(INPUTS, INPUTS, generator=generator, dtype=torch.float64)
    x = torch.randn(SAMPLES, INPUTS, generator=generator, dtype=torch.float64) @ mix
    truth = torch.randn(INPUTS, 1, generator=generator, dtype=torch.float64)
    noise = torch.randn(SAMPLES, 1, generator=generator, dtype=torch.float64).sign()
    y = x @ truth + noise
    model = nn.Linear(INPUTS, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
    return model, x, y


def squared(model, batch):
    x, y = batch
    return 0.5 * (model(x) - y).square().mean()


def classification(model, batch):
    return cross_entropy(model(batch[0]), batch[1])


def rise(seed, sparsity):
    """How much the loss rises: by ours, at best for the same mask, by magnitude."""
    model, x, y = regression(seed)
    start, dense = snapshot(model), squared(model, (x, y)).item()
    batches = list(zip(x.split(1), y.split(1), strict=True))
    once = Obs(UniformTopK(sparsity), gradients=SAMPLES, block=INPUTS, recomputations=1)
    kept = prune_(model, once, batches, loss=squared)["weight"].flatten()
    ours = squared(model, (x, y)).item()
    best = torch.linalg.lstsq(x[:, kept], y).solution.flatten()
    optimum = 0.5 * (x[:, kept] @ best - y.flatten()).square().mean().item()
    model.load_state_dict(start)
    compress_(model, UniformTopK(sparsity))
    magnitude = squared(model, (x, y)).item()
    return ours - dense, optimum - dense, magnitude - dense


@pytest.mark.parametrize("seed", range(5))
def test_one_weight_of_a_quadratic_is_dropped_in_the_best_way(seed):
    ours, optimum, magnitude = rise(seed, 1 / INPUTS)
    assert 0 < ours < 1.01 * optimum
    assert ours < magnitude


def test_half_of_a_quadratic_is_dropped_with_the_best_update_and_at_less_loss_in_the_mean():
    found = [rise(seed, 0.5) for seed in range(5)]
    assert all(ours < 1.01 * optimum for ours, optimum, _ in found)
    assert sum(ours for ours, _, _ in found) < 0.7 * sum(magnitude for _, _, magnitude in found)


def test_scores_are_those_of_the_formula():
    model, x, y = regression(0)
    batches = list(zip(x.split(1), y.split(1), strict=True))
    w = model.weight.detach().flatten().clone()
    gradients = ((x @ w[:, None]) - y) * x
    fisher = gradients.T @ gradients / len(x) + 1e-7 * torch.eye(INPUTS)
    scores = w.square() / (2 * torch.linalg.inv(fisher).diagonal())
    expected = scores >= scores.sort(descending=True).values[4]
    once = Obs(UniformTopK(7 / 12), gradients=SAMPLES, block=INPUTS, recomputations=1)
    masks = prune_(model, once, batches, loss=squared)
    assert torch.equal(masks["weight"].flatten(), expected)


@pytest.mark.parametrize(
    ("pattern", "share"),
    [(GlobalTopK(0.7), 0.7), (UniformTopK(0.61), 0.61), (RowTopK(0.5), 0.5), (NM(2, 4), 0.5)],
    ids=str,
)
def test_every_pattern_is_kept_to_exactly_and_nothing_dropped_comes_back(pattern, share):
    model = ConvNet()
    weights = compressible_weights(model, skip="unused")
    batches = [images(2) for _ in range(24)]
    obs = Obs(pattern, gradients=24, damping=1e-3)
    masks = prune_(model, obs, batches, loss=classification, weights=weights)
    total = sum(w.numel() for w in weights.values())
    dropped = {name: int((~mask).sum()) for name, mask in masks.items()}
    if isinstance(pattern, UniformTopK) and not isinstance(pattern, RowTopK):
        assert dropped == {name: round(share * w.numel()) for name, w in weights.items()}
    else:
        assert sum(dropped.values()) == round(share * total)
    for name, weight in weights.items():
        assert torch.equal(weight != 0, masks[name])
        again = pattern.select(weights)[name]
        assert torch.equal(again, masks[name])


def test_the_sparsity_rises_by_the_same_share_of_what_is_left():
    levels = [pattern.level for pattern in steps(GlobalTopK(1 - 0.5**4), 4)]
    assert levels == pytest.approx([0.5, 0.75, 0.875, 0.9375])
    assert steps(UniformTopK(0.7), 1) == [UniformTopK(0.7)]
    assert [type(pattern) for pattern in steps(RowTopK(0.7), 3)] == [RowTopK] * 3
    assert steps(UniformTopK(0.0), 4) == [UniformTopK(0.0)]


def test_n_of_m_goes_down_one_level_at_a_time():
    assert steps(NM(2, 4), 4) == [NM(3, 4), NM(2, 4)]
    assert steps(NM(2, 4), 1) == [NM(2, 4)]
    assert steps(NM(4, 8), 4) == [NM(7, 8), NM(6, 8), NM(5, 8), NM(4, 8)]
    assert steps(NM(4, 4), 4) == [NM(4, 4)]


def test_the_fisher_matrix_is_estimated_anew_at_every_step():
    model, x, y = regression(0)
    seen = []

    def loss(model, batch):
        seen.append(int(torch.count_nonzero(model.weight)))
        return squared(model, batch)

    batches = list(zip(x.split(100), y.split(100), strict=True))
    prune_(model, Obs(UniformTopK(0.75), gradients=10, recomputations=2), batches, loss=loss)
    assert seen == [12] * 10 + [6] * 10


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_modes_flags_and_buffers_stay_as_they_were(frozen):
    model = ConvNet()
    model.bn1.eval()
    model.requires_grad_(not frozen)
    model.fc.weight.grad = torch.full_like(model.fc.weight, 7)
    before, modes = snapshot(model), [module.training for module in model.modules()]
    weights = compressible_weights(model, skip="unused")
    obs = Obs(UniformTopK(0.5), gradients=4)
    prune_(model, obs, [images() for _ in range(4)], loss=classification, weights=weights)
    assert [module.training for module in model.modules()] == modes
    assert all(p.requires_grad is not frozen for p in model.parameters())
    assert bool((model.fc.weight.grad == 7).all())
    assert model.conv1.weight.grad is None
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (name not in weights), name


def test_bfloat16_weights_are_pruned_by_sums_in_float32():
    class Stored(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, self.weight.float())

    model = Stored(8, 8, bias=False).bfloat16()
    batches = [(torch.randn(4, 8), torch.randint(8, (4,))) for _ in range(16)]
    obs = Obs(UniformTopK(0.5), gradients=16, damping=1e-3)
    masks = prune_(model, obs, batches, loss=classification)
    assert model.weight.dtype is torch.bfloat16
    assert int(masks["weight"].sum()) == 32
    assert int(torch.count_nonzero(model.weight)) == 32


def test_bad_options_are_named():
    for options in ({"gradients": 0}, {"block": 0}, {"recomputations": 1.5}, {"damping": 0.0}):
        with pytest.raises(ValueError, match=f"{next(iter(options))} is .*allowed"):
            Obs(UniformTopK(0.5), **options)


def test_a_pattern_of_others_works_in_one_step():
    class First(Sparsifier):
        def select(self, scores):
            return {n: torch.arange(s.numel()).view(s.shape) < 3 for n, s in scores.items()}

        def __str__(self):
            return "first"

    with pytest.raises(ValueError, match="on the way to first is known: recomputations must be 1"):
        Obs(First())
    model, x, y = regression(0)
    obs = bind(Obs(First(), gradients=1, recomputations=1), model, [(x, y)], loss=squared)
    compress_(model, obs)
    assert torch.equal(model.weight.flatten() != 0, torch.arange(INPUTS) < 3)
