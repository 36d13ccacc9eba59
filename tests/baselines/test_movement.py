"""Movement pruning: the net learns, the sparsity is the scheduled one, or what scores give."""

import pytest
import torch
from digits import accuracy, digit_batches, net, pruned
from problems import adamw, batches, build, loss_on, sgd, train

from torchcram.baselines import Movement, SoftMovement, SparsitySchedule

SCHEDULE = SparsitySchedule(begin=100, end=400, interval=10)


def test_the_net_learns_at_the_scheduled_sparsity():
    model = net()
    base = torch.optim.Adam(model.parameters(), 5e-3)
    optimizer = Movement(model, base, "global:0.8", schedule=SCHEDULE)
    losses = []
    for step, batch in enumerate(digit_batches(600)):
        losses += train(model, optimizer, [batch])
        if step in (0, 99, 100, 200, 300, 400, 599):
            expected = 0.8 - 0.8 * (1 - min((max(step, 100) - 100) / 300, 1)) ** 3
            assert pruned(optimizer.masks) == pytest.approx(expected, abs=2e-4)
    assert sum(losses[-50:]) < 0.3 * sum(losses[:50])
    optimizer.finish()
    assert accuracy(model) > 0.9


def test_soft_movement_prunes_what_falls_below_the_threshold():
    model = net()
    base = torch.optim.Adam(model.parameters(), 5e-3)
    optimizer = SoftMovement(model, base, "global:0.6", schedule=SCHEDULE, penalty=10.0)
    shares, losses = [], []
    for part in digit_batches(800)[:200], digit_batches(800)[200:500], digit_batches(800)[500:]:
        losses += train(model, optimizer, part)
        scores = torch.cat([s.flatten() for s in optimizer.tensors()["scores"].values()])
        shares.append(pruned(optimizer.masks))
        below = (scores.sigmoid() <= 0.1 * optimizer.growth).float().mean().item()
        assert abs(below - shares[-1]) < 0.02  # but for the last step
    assert shares[0] == 0
    assert shares == sorted(shares)
    assert shares[-1] > 0.2
    assert sum(losses[-50:]) < 0.3 * sum(losses[:50])
    optimizer.finish()
    assert accuracy(model) > 0.85


def test_a_larger_penalty_prunes_more():
    shares = []
    for penalty in (0.0, 1.0, 2.0):
        model = build()
        schedule = SparsitySchedule(end=6)
        arguments = {"schedule": schedule, "threshold": 0.49, "score_lr": 0.05}
        optimizer = SoftMovement(model, sgd(model), "global:0.5", penalty=penalty, **arguments)
        for _ in range(5):
            train(model, optimizer, batches())
        shares.append(pruned(optimizer.masks))
    assert 0 <= shares[0] < shares[1] < shares[2] < 1


def test_scores_of_pruned_weights_move_and_their_weights_do_not():
    model = build()
    base = sgd(model, momentum=0, weight_decay=0)
    schedule = SparsitySchedule(end=0)
    optimizer = Movement(model, base, "uniform:0.5", schedule=schedule)
    before = {name: w.detach().clone() for name, w in optimizer.weights.items()}
    train(model, optimizer, batches()[:1])
    for name, mask in optimizer.masks.items():
        moved = optimizer.weights[name].detach() != before[name]
        assert torch.equal(moved, mask)
        assert (optimizer.tensors()["scores"][name] != 0).all()


def test_the_final_masks_keep_the_largest_scores_of_either_sign():
    model = build()
    optimizer = Movement(model, adamw(model), "global:0.25", schedule=SparsitySchedule(end=3))
    train(model, optimizer, batches())
    scores = optimizer.tensors()["scores"]
    masks = optimizer.finish()
    kept = torch.cat([scores[name][mask] for name, mask in masks.items()])
    others = torch.cat([scores[name][~mask] for name, mask in masks.items()])
    assert len(kept) == 144
    assert others.max() <= kept.min() < 0 < kept.max()


@pytest.mark.parametrize(("method", "pull"), [(Movement, None), (SoftMovement, 400 * 0.25 / 192)])
def test_scores_of_layers_without_a_gradient_feel_only_the_penalty(method, pull):
    model = build()
    schedule = SparsitySchedule(end=0)
    optimizer = method(model, sgd(model), "global:0.5", schedule=schedule, score_lr=0.0)
    model[2].weight.requires_grad_(False)
    for batch in batches()[:3]:
        model.zero_grad()  # does not clear the gradients of the scores
        with optimizer.compressed():
            loss_on(model, batch).backward()
        optimizer.step()
        gradient = optimizer.tensors()["scores"]["2.weight"].grad
        if pull is None:
            assert gradient is None
        else:
            torch.testing.assert_close(gradient, torch.full_like(gradient, pull))


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        (Movement, {"score_lr": -1.0}, "score_lr must be at least 0, got -1.0"),
        (SoftMovement, {"penalty": -1.0}, "penalty must be at least 0, got -1.0"),
        (SoftMovement, {"threshold": 1.0}, r"threshold must be in \(0, 1\), got 1.0"),
    ],
)
def test_bad_arguments_are_refused(method, arguments, message):
    model = build()
    base = sgd(model)
    with pytest.raises(ValueError, match=message):
        method(model, base, "global:0.5", schedule=SCHEDULE, **arguments)
    assert len(base.param_groups) == 1
