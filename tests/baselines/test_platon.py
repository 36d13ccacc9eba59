"""PLATON: the net learns at the scheduled sparsity, and pruned weights can come back."""

import pytest
import torch
from digits import accuracy, digit_batches, net, pruned
from problems import batches, build, loss_on, sgd, train

from torchcram import sparsity
from torchcram.baselines import PLATON, SparsitySchedule

SCHEDULE = SparsitySchedule(begin=100, end=400, interval=10)


def test_the_net_learns_at_the_scheduled_sparsity():
    model = net()
    base = torch.optim.Adam(model.parameters(), 5e-3)
    optimizer = PLATON(model, base, "global:0.8", schedule=SCHEDULE)
    losses = []
    for step, batch in enumerate(digit_batches(600)):
        losses += train(model, optimizer, [batch])
        if step in (0, 99, 100, 200, 300, 400, 599):
            expected = 0.8 - 0.8 * (1 - min((max(step, 100) - 100) / 300, 1)) ** 3
            assert pruned(optimizer.masks) == pytest.approx(expected, abs=2e-4)
            assert sparsity(optimizer.weights) == pytest.approx(expected, abs=2e-4)
    assert sum(losses[-50:]) < 0.3 * sum(losses[:50])
    before = {name: mask.clone() for name, mask in optimizer.masks.items()}
    for name, mask in optimizer.finish().items():
        assert torch.equal(mask, before[name])  # the schedule has ended at the target
    assert accuracy(model) > 0.9


def test_pruned_weights_with_high_scores_come_back_with_a_step():
    model = build()
    optimizer = PLATON(
        model, sgd(model), "global:0.5", schedule=SparsitySchedule(end=0, interval=1)
    )
    train(model, optimizer, batches()[:2])
    name, mask = next((name, mask) for name, mask in optimizer.masks.items() if not mask.all())
    at = tuple((~mask).nonzero()[0])
    for average in optimizer.tensors().values():
        average[name][at] = 1e6
    train(model, optimizer, batches()[2:3])
    assert optimizer.masks[name][at]
    assert optimizer.weights[name][at] != 0
    assert sparsity(optimizer.weights) == 0.5


def test_a_plain_loop_takes_the_same_steps_as_a_closure():
    model, twin = build(), build()
    schedule = SparsitySchedule(begin=2, end=8, interval=2)
    optimizer = PLATON(model, sgd(model), "global:0.75", schedule=schedule)
    other = PLATON(twin, sgd(twin), "global:0.75", schedule=schedule)
    train(model, optimizer, batches())
    for batch in batches():
        other.zero_grad()
        loss_on(twin, batch).backward()
        other.step()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_finish_brings_no_weight_back_without_a_step():
    model = build()
    schedule = SparsitySchedule(end=0, interval=100)
    optimizer = PLATON(model, sgd(model), "global:0.5", schedule=schedule)
    train(model, optimizer, batches())
    before = {name: mask.clone() for name, mask in optimizer.masks.items()}
    for average in optimizer.tensors().values():
        for name, mask in before.items():
            average[name][~mask] = 1e6
    for name, mask in optimizer.finish().items():
        assert torch.equal(mask, before[name])
    assert sparsity(optimizer.weights) == 0.5


def test_finish_in_the_middle_of_the_schedule_prunes_further():
    model = build()
    schedule = SparsitySchedule(end=100, interval=1)
    optimizer = PLATON(model, sgd(model), "global:0.9", schedule=schedule)
    train(model, optimizer, batches())
    before = {name: mask.clone() for name, mask in optimizer.masks.items()}
    assert 0 < pruned(before) < 0.5
    scores = optimizer.scores()
    masks = optimizer.finish()
    assert sparsity(optimizer.weights) == pruned(masks) > 0.89
    lowest = min(scores[n][masks[n]].min() for n in masks if masks[n].any())
    for name, mask in masks.items():
        assert not (mask & ~before[name]).any()
        assert (scores[name][before[name] & ~mask] <= lowest).all()


def test_a_rare_but_large_sensitivity_beats_a_steady_one_of_the_same_average():
    scores = []
    for sensitivities in ([1.0] * 40, [0.0, 2.0] * 20):
        model = torch.nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(1.0)
        base = torch.optim.SGD(model.parameters(), 0.0)
        optimizer = PLATON(model, base, "global:0.0", schedule=SparsitySchedule(end=1000))
        for value in sensitivities:
            model.weight.grad = torch.full((1, 1), value)
            optimizer.step()
        scores.append(optimizer.scores()["weight"].item())
    assert scores[1] > 5 * scores[0]


@pytest.mark.parametrize("name", ["beta1", "beta2"])
def test_bad_arguments_are_refused(name):
    model = build()
    with pytest.raises(ValueError, match=rf"{name} must be in \[0, 1\), got 1.0"):
        PLATON(model, sgd(model), "global:0.5", schedule=SCHEDULE, **{name: 1.0})
