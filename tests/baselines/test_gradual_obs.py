"""Gradual second-order pruning: when F is collected, freed and saved; what is refused."""

import io

import pytest
import torch
from problems import BATCHES, adamw, batches, build, loss_on, sgd, train

from torchcram import compressible_weights, sparsity
from torchcram.baselines import GradualMagnitude, GradualObs, SparsitySchedule

SCHEDULE = SparsitySchedule(begin=2, end=9, interval=4, initial=0.2)  # prunes at 2, 6 and 9


def surgeon(model, base=None, **options):
    options = {"schedule": SCHEDULE, "gradients": 3, **options}
    return GradualObs(model, base or sgd(model), "global:0.75", **options)


def counts(gradients):
    """Returns the number of gradients in F after every step; None without F."""
    model = build()
    optimizer = surgeon(model, gradients=gradients)
    seen = []
    for batch in batches():
        train(model, optimizer, [batch])
        fisher = optimizer._fisher
        seen.append(None if fisher is None else fisher.count)
    return seen


def test_fisher_is_collected_before_pruning_and_freed_by_it():
    none = None
    assert counts(1) == [none, 1, none, none, none, 1, none, none, 1, none, none, none]
    assert counts(2) == [1, 2, none, none, 1, 2, none, 1, 2, none, none, none]
    # at most all gradients since the last pruning step
    assert counts(1024) == [1, 2, 1, 2, 3, 4, 1, 2, 3, none, none, none]


def test_sparsity_follows_the_schedule():
    model = build()
    optimizer = surgeon(model)
    for step, batch in enumerate(batches()):
        train(model, optimizer, [batch])
        pruned_at = max((due for due in (2, 6, 9) if due <= step), default=0)
        level = SCHEDULE.sparsity(pruned_at, 0.75)
        assert sparsity(compressible_weights(model)) == 1 - (192 - round(level * 192)) / 192


def test_a_schedule_that_begins_at_0_without_pruning_needs_no_gradient():
    model = build()
    optimizer = surgeon(model, schedule=SparsitySchedule(end=6, interval=3))
    train(model, optimizer, batches())
    assert sparsity(compressible_weights(model)) == 0.75


def test_the_correction_lowers_the_loss_of_pruning():
    data = batches(3) * 40
    schedule = SparsitySchedule(begin=100, end=100)
    losses = []
    for method, options in ((GradualMagnitude, {}), (GradualObs, {"gradients": 60, "block": 64})):
        model = build()
        optimizer = method(model, sgd(model, 0.0), "global:0.6", schedule=schedule, **options)
        train(model, optimizer, data[:100])
        with optimizer.compressed(), torch.no_grad():  # the step that prunes has begun
            losses.append(sum(loss_on(model, batch).item() for batch in data[:3]))
    assert losses[1] < losses[0]


@pytest.mark.parametrize("base_of", [sgd, adamw])
@pytest.mark.parametrize("cut", range(1, BATCHES))
def test_a_training_resumes_bit_for_bit_while_fisher_is_collected(base_of, cut):
    model = build()
    train(model, surgeon(model, base_of(model)), batches())
    first = build()
    before = surgeon(first, base_of(first))
    train(first, before, batches()[:cut])
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = build(seed=5)
    after = surgeon(second, base_of(second))
    train(second, after, batches(2))  # an F of its own, which the state replaces
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    train(second, after, batches()[cut:])
    for ours, theirs in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_state_with_other_blocks_is_refused_and_changes_nothing():
    model = build()
    optimizer = surgeon(model, block=10)
    train(model, optimizer, batches(5))
    other = surgeon(twin := build(), block=20)
    with pytest.raises(ValueError, match="other blocks than those of 20 weights"):
        other.load_state_dict(optimizer.state_dict())
    assert other.steps == 0
    assert other._fisher is None
    assert not other.state_dict()["state"]
    train(twin, other, batches())


def test_the_state_of_a_base_optimizer_loads():
    base = sgd(model := build())
    train(model, base, batches(2))
    optimizer = surgeon(model)
    optimizer.load_state_dict(base.state_dict())
    assert optimizer.steps == 0
    train(model, optimizer, batches())


def test_gradients_that_are_not_finite_prune_nothing():
    model = build()
    optimizer = surgeon(model, torch.optim.SGD(model.parameters(), 0.0))
    train(model, optimizer, batches(1))
    optimizer.zero_grad()
    (loss_on(model, batches()[1]) * 1e30).backward()
    for weight in compressible_weights(model).values():
        weight.grad.fill_(float("inf"))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer.combine_()
    optimizer.steps += 1
    with pytest.raises(ValueError, match="gradients are not finite in"):
        train(model, optimizer, batches(1))
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])


def test_f_is_a_sum_in_float32_under_autocast():
    model, twin = build(), build()
    train(model, plain := surgeon(model, torch.optim.SGD(model.parameters(), 0.0)), batches(2))
    optimizer = surgeon(twin, torch.optim.SGD(twin.parameters(), 0.0))
    for batch in batches(2):
        optimizer.zero_grad()
        loss_on(twin, batch).backward()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            optimizer.step()
    for name, total in plain._fisher.state_dict()["sums"].items():
        assert torch.equal(optimizer._fisher.state_dict()["sums"][name], total)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gradients": 0}, "gradients is 0, allowed are integers from 1"),
        ({"block": 0}, "block is 0, allowed are integers from 1"),
        ({"damping": 0.0}, "damping is 0.0, allowed are numbers above 0"),
        (
            {"schedule": SparsitySchedule(end=3, initial=0.5)},
            "prunes at step 0, before there is any gradient: begin must be at least 1",
        ),
        ({"schedule": SparsitySchedule(end=0)}, "prunes at step 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        surgeon(build(), **arguments)


@pytest.mark.parametrize(("begin", "end", "interval"), [(0, 9, 4), (2, 9, 4), (3, 3, 2), (1, 7, 1)])
def test_the_next_pruning_step_is_the_next_one_that_is_due(begin, end, interval):
    schedule = SparsitySchedule(begin=begin, end=end, interval=interval)
    for step in range(12):
        later = [each for each in range(step + 1, 12) if schedule.is_due(each)]
        assert schedule.next_due(step) == (later[0] if later else None)
