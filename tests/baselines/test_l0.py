"""Gates: they learn to close, draw the same numbers everywhere, and the end is exact."""

import math
from dataclasses import dataclass

import pytest
import torch
from digits import accuracy, digit_batches, net, pruned
from problems import adamw, batches, build, sgd, train

from torchcram import NM, Sparsifier, parse_operator, sparsity
from torchcram.baselines import L0, SparsitySchedule
from torchcram.baselines.penalty import AdaptivePenalty, sparsity_of


def share_closed(optimizer):
    """Returns 1 - mean(P(z > 0))."""
    log_a = torch.cat([a.flatten() for a in optimizer.tensors()["log_a"].values()])
    return 1 - (log_a - 2 / 3 * math.log(0.1 / 1.1)).sigmoid().mean().item()


def test_the_net_learns_while_the_penalty_closes_gates():
    model = net()
    base = torch.optim.Adam(model.parameters(), 5e-3)
    optimizer = L0(model, base, "global:0.7", penalty=2.0, gate_lr=2e-2)
    data = digit_batches(600)
    shares, losses = [share_closed(optimizer)], []
    for part in range(3):
        losses += train(model, optimizer, data[200 * part : 200 * (part + 1)])
        shares.append(share_closed(optimizer))
        assert abs(pruned(optimizer.masks) - shares[-1]) < 0.02  # drawn with that probability
    assert sum(losses[-50:]) < 0.3 * sum(losses[:50])
    assert shares == sorted(shares)
    assert shares[-1] > shares[0] + 0.3
    optimizer.finish()
    assert accuracy(model) > 0.9


def test_without_a_penalty_gates_do_not_close():
    model = net()
    optimizer = L0(model, torch.optim.Adam(model.parameters(), 5e-3), "global:0.7", penalty=0)
    before = share_closed(optimizer)
    train(model, optimizer, digit_batches(100))
    assert share_closed(optimizer) < before + 0.05


def test_the_penalty_does_not_depend_on_the_number_of_weights():
    gradients = []
    for width in (8, 80):
        model = torch.nn.Linear(width, 4)
        optimizer = L0(model, sgd(model, momentum=0), "global:0.5", penalty=3.0)
        optimizer.step(lambda model=model: model.zero_grad())
        (group,) = [g for g in optimizer.param_groups if g["weight_decay"] == 0]
        gradients.append(sum(p.grad.sum().item() for p in group["params"]))
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-3)
    opened = 1 / (1 + math.exp(-(math.log(0.7 / 0.3) - 2 / 3 * math.log(0.1 / 1.1))))
    assert gradients[0] == pytest.approx(3 * opened * (1 - opened), rel=1e-2)


@pytest.mark.parametrize(
    ("target", "steps"),
    [("global:0.5", 600), ("uniform:0.8", 600), ("nm:1:4", 600), ("global:0.8", 300)],
)
def test_an_adaptive_penalty_reaches_the_target(target, steps):
    model = net()
    base = torch.optim.Adam(model.parameters(), 5e-3)
    optimizer = L0(model, base, target, gate_lr=0.1, drop_rate=0.1, end=3 * steps // 4)
    data, wanted, shares = digit_batches(steps), sparsity_of(optimizer.operator), []
    for part in range(4):
        train(model, optimizer, data[steps * part // 4 : steps * (part + 1) // 4])
        shares.append(optimizer.reached_sparsity())
    assert shares[0] < shares[1]
    assert shares[2:] == pytest.approx([wanted] * 2, abs=0.05)
    optimizer.finish()
    if target.startswith("global"):  # the penalty does not see single layers
        assert accuracy(model) > 0.9


def test_the_factor_of_an_adaptive_penalty():
    weights = dict(build().named_parameters())
    penalty = AdaptivePenalty(SparsitySchedule(100), parse_operator("global:0.8"), weights)
    v = 0.0
    for step, reached in ((10, 0.0), (20, 0.5), (50, 0.9), (100, 0.8), (200, 0.7)):
        penalty.set_step_(step)
        error = 0.8 * (1 - max(1 - step / 100, 0) ** 3) - reached
        v += error
        factor = penalty.follow_(torch.tensor(reached))
        expected = math.sinh(max(-20, min(v + 10 * error, 20)))
        assert factor.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert penalty.v.item() == pytest.approx(v, rel=1e-5)
    for _ in range(1000):
        factor = penalty.follow_(torch.tensor(0.0))
    assert factor.item() == pytest.approx(math.sinh(20), rel=1e-4)
    assert penalty.v == 20


def test_an_adaptive_penalty_has_to_end_within_the_training():
    model = build()
    with pytest.raises(ValueError, match="end must be None or at least 1, got 0"):
        L0(model, sgd(model), "global:0.5", end=0)
    with pytest.raises(ValueError, match="penalty must be greater than 0 to be adapted, got 0"):
        L0(model, sgd(model), "global:0.5", penalty=0, end=5)
    optimizer = L0(model, sgd(model), "global:0.5", end=10)
    optimizer.check_length(11)
    with pytest.raises(ValueError, match="the schedule ends at step 10"):
        optimizer.check_length(10)


def test_states_of_fixed_and_adaptive_penalties_are_told_apart():
    states = []
    for end in (None, 5):
        model = build()
        optimizer = L0(model, sgd(model), "global:0.5", end=end)
        states.append((optimizer, optimizer.state_dict()))
    (fixed, first), (adaptive, second) = states
    with pytest.raises(ValueError, match="has adaptive penalties, and this optimizer fixed ones"):
        fixed.load_state_dict(second)
    with pytest.raises(ValueError, match="has fixed penalties, and this optimizer adaptive ones"):
        adaptive.load_state_dict(first)


def test_a_penalty_adapts_only_to_a_known_sparsity():
    @dataclass(frozen=True)
    class Half(Sparsifier):
        def select(self, scores):
            return NM(1, 2).select(scores)

    model = build()
    L0(model, sgd(model), Half())
    with pytest.raises(ValueError, match="is not known in advance"):
        L0(model, sgd(model), Half(), end=5)


def gate(log_a):
    return (log_a.sigmoid() * 1.2 - 0.1).clamp(0, 1)


def test_the_final_weights_are_gated_without_noise():
    model = build()
    optimizer = L0(model, sgd(model), "global:0.5")
    train(model, optimizer, batches())
    dense = {name: w.detach().clone() for name, w in optimizer.weights.items()}
    masks = optimizer.finish()
    gated = {n: dense[n] * gate(a) for n, a in optimizer.tensors()["log_a"].items()}
    lowest = min(gated[n].abs()[masks[n]].min() for n in masks)
    for name, weight in optimizer.weights.items():
        torch.testing.assert_close(weight.detach(), gated[name].masked_fill(~masks[name], 0))
        assert (gated[name].abs()[~masks[name]] <= lowest).all()


@pytest.mark.parametrize("target", ["global:0.5", "uniform:0.5", "nm:2:4", "global:0.0"])
def test_gates_that_closed_too_often_are_opened_by_one_amount(target):
    model = build()
    optimizer = L0(model, sgd(model), target)
    generator = torch.Generator().manual_seed(0)
    log_a = optimizer.tensors()["log_a"]
    for value in log_a.values():
        value.uniform_(-4.5, -2.0, generator=generator)
    dense = {name: w.detach().clone() for name, w in optimizer.weights.items()}
    masks = optimizer.finish()
    assert sparsity(optimizer.weights) == pruned(masks)
    closed = math.log(0.1 / 1.1)
    if target == "nm:2:4":
        return
    ranked_together = [list(masks)] if target[0] == "g" else [[name] for name in masks]
    for names in ranked_together:
        kept = torch.cat([log_a[n][masks[n]] for n in names])
        others = torch.cat([log_a[n][~masks[n]] for n in names])
        edge = others.max() if len(others) else kept.min()
        assert kept.min() >= edge  # closed gates are ranked by log a
        for n in names:
            expected = (dense[n] * gate(log_a[n] + closed - edge)).masked_fill(~masks[n], 0)
            torch.testing.assert_close(optimizer.weights[n].detach(), expected)


def test_gates_stay_where_they_have_a_gradient():
    model = build()
    optimizer = L0(model, sgd(model), "global:0.5", penalty=1e6)
    train(model, optimizer, batches())
    for log_a in optimizer.tensors()["log_a"].values():
        assert log_a.min() >= math.log(0.01) - 1e-6
    assert share_closed(optimizer) > 0.9


def test_seeds_decide_the_gates_and_global_seeds_do_not():
    results = []
    for seed, global_seed in ((0, 1), (0, 2), (3, 1)):
        model = build()
        optimizer = L0(model, adamw(model), "global:0.5", seed=seed)
        torch.manual_seed(global_seed)
        train(model, optimizer, batches()[:3])
        results.append(model[0].weight.detach().clone())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_states_with_other_generators_are_refused():
    model = build()
    optimizer = L0(model, sgd(model), "global:0.5")
    state = optimizer.state_dict()
    state["baseline"]["generators"] = []
    with pytest.raises(ValueError, match="random generators of other devices than cpu"):
        optimizer.load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"penalty": -1.0}, "penalty must be at least 0, got -1.0"),
        ({"drop_rate": 0.0}, r"drop_rate must be in \(0, 1\), got 0.0"),
        ({"gate_lr": -1.0}, "gate_lr must be None or at least 0, got -1.0"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    model = build()
    base = sgd(model)
    with pytest.raises(ValueError, match=message):
        L0(model, base, "global:0.5", **arguments)
    assert len(base.param_groups) == 1
