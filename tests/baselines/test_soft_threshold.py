"""Soft thresholds: they learn, they prune more and more, and the end is exact."""

import copy

import pytest
import torch
from digits import accuracy, digit_batches, net, pruned
from problems import batches, build, sgd, train
from torch import nn

from torchcram import compressible_weights, sparsity
from torchcram.baselines import STR


def soft(weight, threshold):
    return weight.sign() * (weight.abs() - threshold).clamp(min=0)


def test_the_net_learns_while_weight_decay_raises_the_thresholds():
    model = net()
    base = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-3)
    optimizer = STR(model, base, "global:0.8", initial=-7.0, threshold_decay=2e-3)
    data = digit_batches(600)
    shares, losses = [], []
    for part in range(3):
        losses += train(model, optimizer, data[200 * part : 200 * (part + 1)])
        shares.append(pruned(optimizer.masks))
        for name, mask in optimizer.masks.items():
            weight, threshold = model.get_parameter(name), optimizer.thresholds[name].item()
            changed = mask != (weight.abs() > threshold)  # by the last step, after the mask
            assert changed.float().mean() < 0.02
    assert sum(losses[-50:]) < 0.2 * sum(losses[:50])
    assert shares == sorted(shares)
    assert shares[0] > 0.02
    assert shares[-1] > shares[0] + 0.1
    optimizer.finish()
    assert accuracy(model) > 0.9


def test_thresholds_below_the_target_prune_their_share_and_top_k_the_rest():
    model = build()
    optimizer = STR(model, sgd(model), "global:0.9", initial=-3.0)
    dense = {name: w.detach().clone() for name, w in optimizer.weights.items()}
    masks = optimizer.finish()
    threshold = torch.tensor(-3.0).sigmoid()
    for name, weight in optimizer.weights.items():
        expected = soft(dense[name], threshold).masked_fill(~masks[name], 0)
        torch.testing.assert_close(weight.detach(), expected)


@pytest.mark.parametrize(
    "target", ["global:0.3", "uniform:0.3", "row:0.25", "nm:3:4", "global:0.0"]
)
def test_thresholds_that_prune_too_much_are_lowered_together(target):
    model = build()
    optimizer = STR(model, sgd(model), target, initial=0.0)  # a threshold of 0.5 prunes all
    with torch.no_grad():
        optimizer.tensors()["thresholds"]["0.weight"].fill_(-0.1)
    before = {name: w.detach().clone() for name, w in optimizer.weights.items()}
    thresholds = optimizer.thresholds
    masks = optimizer.finish()
    assert sparsity(optimizer.weights) == pruned(masks)
    shifts = {}
    for name, weight in optimizer.weights.items():
        kept = masks[name]
        assert torch.equal(weight.sign(), before[name].sign().masked_fill(~kept, 0))
        lowered = before[name].abs() - weight.detach().abs()
        shift = (thresholds[name].flatten() - lowered[kept]).unique()
        assert shift.max() - shift.min() < 1e-6  # one threshold for the whole layer
        shifts[name] = shift.mean().item()
        if target[0] in "gu":  # what is pruned is below the threshold
            assert (before[name].abs()[~kept] <= lowered[kept].min() + 1e-6).all()
    if target == "global:0.3":
        assert abs(shifts["0.weight"] - shifts["2.weight"]) < 1e-6
        largest = max(before[n].abs()[~masks[n]].max() - thresholds[n].item() for n in masks)
        assert abs(shifts["0.weight"] + largest.item()) < 1e-6


def test_no_threshold_is_lowered_below_zero():
    model = build()
    optimizer = STR(model, sgd(model), "global:0.1", initial=-20.0)
    with torch.no_grad():
        optimizer.tensors()["thresholds"]["2.weight"].fill_(2.0)
    before = optimizer.weights["0.weight"].detach().clone()
    masks = optimizer.finish()
    kept = masks["0.weight"]
    torch.testing.assert_close(optimizer.weights["0.weight"].detach()[kept], before[kept])
    assert sparsity(optimizer.weights) == pruned(masks)


def test_equal_weights_are_cut_to_the_exact_count():
    model = build()
    with torch.no_grad():
        for weight in compressible_weights(model).values():
            weight.copy_(weight.sign() * 0.25)
    optimizer = STR(model, sgd(model), "global:0.3", initial=2.0)
    masks = optimizer.finish()
    assert sparsity(optimizer.weights) == pruned(masks) == 1 - (192 - round(0.3 * 192)) / 192


def test_q_k_and_v_have_thresholds_of_their_own():
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2)
    optimizer = STR(model, sgd(model, momentum=0), "uniform:0.5", initial=-2.0)
    q, k, v = optimizer.tensors()["thresholds"]["in_proj_weight"].flatten()
    assert (q, k, v) == (-2, -2, -2)
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(1))

    def closure():
        optimizer.zero_grad()
        loss = model(x, x, x)[0].square().sum()
        loss.backward()
        return loss

    for _ in range(5):
        optimizer.step(closure)
    assert len(optimizer.tensors()["thresholds"]["in_proj_weight"].unique()) == 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_q_k_and_v_move_by_their_thresholds_and_return_their_gradients(dtype):
    torch.manual_seed(0)
    model = nn.MultiheadAttention(8, 2).to(dtype)
    optimizer = STR(model, sgd(model), "uniform:0.5")
    s = optimizer.tensors()["thresholds"]["in_proj_weight"]
    s.copy_(torch.tensor([-1.0, -2.0, -3.0]).view_as(s))
    before = model.in_proj_weight.detach().to(s.dtype).view(3, 8, 8)
    exact = s.clone().requires_grad_()
    expected = before.sign() * (before.abs() - exact.sigmoid()).relu()
    gradient = torch.randn(24, 8).to(dtype)
    with optimizer.compressed():
        moved = model.in_proj_weight.detach().clone()
        model.in_proj_weight.grad = gradient.clone()
    assert torch.equal(moved != 0, optimizer.masks["in_proj_weight"])
    assert torch.equal(moved != 0, expected.flatten(0, 1) != 0)
    tiny = torch.finfo(dtype).tiny  # what float16 would round to zero
    torch.testing.assert_close(moved, expected.detach().flatten(0, 1).to(dtype), rtol=0, atol=tiny)
    with torch.no_grad():
        optimizer.combine_()
    expected.backward(gradient.to(s.dtype).view(3, 8, 8))
    torch.testing.assert_close(s.grad, exact.grad)


def test_thresholds_train_with_the_options_of_the_weights_or_their_own():
    model = build()
    STR(model, base := sgd(model), "global:0.5")
    assert base.param_groups[-1]["weight_decay"] == 1e-2
    assert base.param_groups[-1]["lr"] == 0.1
    assert base.param_groups[-1]["momentum"] == 0.9
    STR(model, base := sgd(model), "global:0.5", threshold_lr=0.5, threshold_decay=0.0)
    assert base.param_groups[-1]["weight_decay"] == 0
    assert base.param_groups[-1]["lr"] == 0.5
    named = torch.optim.AdamW(model.named_parameters(), torch.tensor(0.1))
    STR(model, named, "global:0.5")
    assert named.param_groups[-1]["param_names"] == ["thresholds.0.weight", "thresholds.2.weight"]
    assert named.param_groups[-1]["lr"] is not named.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": float("nan")}, "initial must be a finite number, got nan"),
        ({"threshold_lr": -1.0}, "threshold_lr must be None or at least 0, got -1.0"),
        ({"threshold_decay": -1.0}, "threshold_decay must be None or at least 0, got -1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    model = build()
    base = sgd(model)
    with pytest.raises(ValueError, match=message):
        STR(model, base, "global:0.5", **arguments)
    assert len(base.param_groups) == 1


def test_the_sparsity_that_thresholds_have_reached_changes_nothing():
    model = build()
    optimizer = STR(model, sgd(model), "global:0.9", initial=-3.0)
    train(model, optimizer, batches())
    before = copy.deepcopy((model.state_dict(), optimizer.kept_tensors()))
    reached = optimizer.reached_sparsity()
    scores = torch.cat([score.flatten() for score in optimizer.scores().values()])
    assert reached == pytest.approx((scores <= 0).float().mean().item(), abs=0.05)
    assert 0.05 < reached < 0.85
    after = (model.state_dict(), optimizer.kept_tensors())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    optimizer.finish()
    assert optimizer.reached_sparsity() == sparsity(optimizer.weights)
