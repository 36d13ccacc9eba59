"""What every method has in common: exact targets, exact resume, interrupts, refused input."""

import copy
import io

import pytest
import torch
from problems import BATCHES, adamw, batches, build, loss_on, sgd, train

from torchcram import compressible_weights, hold_masks, sparsity
from torchcram.baselines import (
    ACDC,
    DPF,
    L0,
    PLATON,
    SFW,
    SRSTE,
    STR,
    CompressionAwareSFW,
    GradualMagnitude,
    GradualObs,
    LotteryTickets,
    Movement,
    SoftMovement,
    SparsitySchedule,
)

SCHEDULE = SparsitySchedule(begin=2, end=8, interval=3)
METHODS = {
    "gradual magnitude": lambda model, base, target="global:0.9": GradualMagnitude(
        model, base, target, schedule=SCHEDULE
    ),
    "DPF": lambda model, base, target="global:0.9": DPF(model, base, target, schedule=SCHEDULE),
    "AC/DC": lambda model, base, target="global:0.9": ACDC(
        model, base, target, warmup=3, period=2, end=9
    ),
    "STR": lambda model, base, target="global:0.9": STR(model, base, target, initial=-3.0),
    "l0": lambda model, base, target="global:0.9": L0(model, base, target, penalty=100),
    "adaptive l0": lambda model, base, target="global:0.9": L0(
        model, base, target, penalty=1, end=6
    ),
    "movement": lambda model, base, target="global:0.9": Movement(
        model, base, target, schedule=SCHEDULE
    ),
    "soft movement": lambda model, base, target="global:0.9": SoftMovement(
        model, base, target, schedule=SCHEDULE, threshold=0.5
    ),
    "PLATON": lambda model, base, target="global:0.9": PLATON(
        model, base, target, schedule=SCHEDULE
    ),
    "SR-STE": lambda model, base, target="global:0.9": SRSTE(model, base, target),
    "SFW": lambda model, base, target="global:0.9": SFW(model, base, target),
    "compression-aware SFW": lambda model, base, target="global:0.9": CompressionAwareSFW(
        model, base, target
    ),
    "lottery tickets": lambda model, base, target="global:0.9": LotteryTickets(
        model, base, target, round_steps=6, rewind_step=3, rounds=3
    ),
    "gradual OBS": lambda model, base, target="global:0.9": GradualObs(
        model, base, target, schedule=SparsitySchedule(begin=2, end=8, interval=4), gradients=3
    ),
}
each_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@each_method
@pytest.mark.parametrize("target", ["global:0.9", "uniform:0.71", "global:0.333"])
def test_ends_at_exactly_the_target(method, target):
    model = build()
    optimizer = method(model, sgd(model), target)
    train(model, optimizer, batches())
    masks = optimizer.finish()
    weights = compressible_weights(model)
    kept = sum(int(mask.sum()) for mask in masks.values())
    total = sum(weight.numel() for weight in weights.values())
    level = float(target.split(":")[1])
    counts = [weight.numel() for weight in weights.values()] if "uniform" in target else [total]
    assert kept == sum(count - round(level * count) for count in counts)
    assert sparsity(weights) == 1 - kept / total
    with hold_masks(optimizer.base, weights, masks):
        train(model, optimizer.base, batches(2))
    assert sparsity(weights) >= 1 - kept / total


@each_method
def test_finish_ends_the_training(method):
    model = build()
    optimizer = method(model, sgd(model))
    train(model, optimizer, batches())
    masks = {name: mask.clone() for name, mask in optimizer.finish().items()}
    finished = copy.deepcopy(model.state_dict())
    twin = build(seed=5)
    other = method(twin, sgd(twin))
    twin.load_state_dict(finished)
    other.load_state_dict(optimizer.state_dict())
    for again in (optimizer, other):
        for name, mask in again.finish().items():
            assert torch.equal(mask, masks[name])
        for name, value in again.model.state_dict().items():
            assert torch.equal(value, finished[name])
        with pytest.raises(RuntimeError, match=r"finish\(\) has ended the training"):
            train(again.model, again, batches())


@each_method
@pytest.mark.parametrize("base_of", [sgd, adamw])
@pytest.mark.parametrize("cut", [1, 4, 9])
def test_a_resumed_training_is_the_same_bit_for_bit(method, base_of, cut):
    model = build()
    optimizer = method(model, base_of(model))
    train(model, optimizer, batches())

    first = build()
    before = method(first, base_of(first))
    train(first, before, batches()[:cut])
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": before.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    second = build(seed=5)
    after = method(second, base_of(second))
    second.load_state_dict(saved["model"])
    after.load_state_dict(saved["optimizer"])
    train(second, after, batches()[cut:])
    for ours, theirs in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for name, mask in after.finish().items():
        assert torch.equal(mask, optimizer.finish()[name])


@each_method
def test_a_step_without_gradients_moves_nothing(method):
    model = build()
    before = copy.deepcopy(model.state_dict())
    optimizer = method(model, torch.optim.SGD(model.parameters(), 0.1))
    with optimizer.compressed():
        pass
    optimizer.step()
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@each_method
def test_a_step_with_closure_equals_one_without(method):
    model, twin = build(), build()
    optimizer, other = method(model, sgd(model)), method(twin, sgd(twin))
    train(model, optimizer, batches())
    for batch in batches():
        other.zero_grad()
        with other.compressed():
            loss_on(twin, batch).backward()
        other.step()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@each_method
def test_w_comes_back_when_the_pass_fails(method):
    model = build()
    optimizer = method(model, sgd(model))
    train(model, optimizer, batches()[:5])
    before = copy.deepcopy(model.state_dict())

    def fails():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(fails)
    masks = optimizer.masks
    for name, value in model.state_dict().items():
        expected = before[name]
        pruned = not optimizer.moves and not isinstance(optimizer, PLATON)  # before the pass
        if pruned and name in masks:
            expected = expected.masked_fill(~masks[name], 0)
        assert torch.equal(value, expected)
    train(model, optimizer, batches()[5:])
    assert optimizer.steps == BATCHES


@each_method
@pytest.mark.parametrize("cut", range(BATCHES))
def test_a_training_interrupted_in_a_pass_resumes_bit_for_bit(method, cut):
    model = build()
    uninterrupted = method(model, sgd(model))
    train(model, uninterrupted, batches())

    first = build()
    before = method(first, sgd(first))
    train(first, before, batches()[:cut])

    def fails():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        before.step(fails)
    saved = copy.deepcopy((first.state_dict(), before.state_dict()))
    second = build(seed=5)
    after = method(second, sgd(second))
    second.load_state_dict(saved[0])
    after.load_state_dict(saved[1])
    train(second, after, batches()[cut:])
    for ours, theirs in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(after.kept_tensors(), uninterrupted.kept_tensors(), strict=True):
        assert torch.equal(ours, theirs)


@each_method
def test_a_learning_rate_of_zero_changes_only_what_is_pruned(method):
    model = build()
    base = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    before = copy.deepcopy(model.state_dict())
    optimizer = method(model, base)
    train(model, optimizer, batches())
    for name, value in model.state_dict().items():
        if isinstance(optimizer, GradualObs) and name in optimizer.masks:
            continue  # weights that are kept are corrected
        if isinstance(optimizer, PLATON) and name in optimizer.masks:
            assert (value[~optimizer.masks[name]] == 0).all()
            assert torch.equal(value, before[name].masked_fill(value == 0, 0))  # none comes back
            continue
        kept = optimizer.masks.get(name, torch.ones(()) == 1) if not optimizer.moves else None
        expected = before[name] if kept is None else before[name].masked_fill(~kept, 0)
        assert torch.equal(value, expected)


@each_method
def test_targets_that_cannot_be_reached_are_refused(method):
    model = build()
    for target, message in (("int4", "prunes to one target"), ("global:0.5-0.9", "cannot take")):
        with pytest.raises(ValueError, match=message):
            method(model, sgd(model), target)


@pytest.mark.parametrize(
    "name",
    [
        "gradual magnitude",
        "gradual OBS",
        "DPF",
        "lottery tickets",
        "movement",
        "soft movement",
        "PLATON",
    ],
)
def test_a_schedule_needs_a_sparsity(name):
    model = build()
    with pytest.raises(ValueError, match="nm:2:4 has no single sparsity that could grow"):
        METHODS[name](model, sgd(model), "nm:2:4")


@pytest.mark.parametrize("kind", [GradualMagnitude, DPF, Movement, SoftMovement, PLATON])
def test_a_schedule_that_begins_above_the_target_is_refused(kind):
    model = build()
    kind(model, sgd(model), "global:0.5", schedule=SparsitySchedule(end=8, initial=0.5))
    with pytest.raises(ValueError, match=r"initial must be at most .* global:0.5, got 0.6"):
        kind(model, sgd(model), "global:0.5", schedule=SparsitySchedule(end=8, initial=0.6))


def test_a_step_with_a_gradient_at_w_is_refused():
    model = build()
    optimizer = DPF(model, sgd(model), "global:0.9", schedule=SCHEDULE)
    loss_on(model, batches()[0]).backward()
    with pytest.raises(RuntimeError, match="DPF needs it at w~"):
        optimizer.step()


def test_the_state_of_another_method_is_refused():
    model = build()
    state = METHODS["DPF"](model, sgd(model)).state_dict()
    with pytest.raises(ValueError, match="the state is one of DPF, this optimizer is ACDC"):
        METHODS["AC/DC"](model, sgd(model)).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"begin": -1, "end": 3}, "begin must be at least 0, got -1"),
        ({"begin": 5, "end": 3}, "end must be at least begin, which is 5, got 3"),
        ({"end": 3, "interval": 0}, "interval must be at least 1"),
        ({"end": 3, "initial": 1.0}, r"initial must be in \[0, 1\)"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SparsitySchedule(**arguments)


def test_a_schedule_that_ends_after_the_training_is_refused():
    SparsitySchedule(end=9).check_length(10)
    with pytest.raises(ValueError, match="ends at step 10, and the training has only 10 steps"):
        SparsitySchedule(end=10).check_length(10)


@each_method
@pytest.mark.parametrize("base_of", [sgd, adamw])
def test_what_precedes_a_replayed_step_and_a_captured_step_make_a_step(method, base_of):
    model, twin = build(), build()
    optimizer, other = method(model, base_of(model)), method(twin, base_of(twin))
    if not other.capturable_steps:
        pytest.skip("its steps differ from one another")
    train(model, optimizer, batches())
    for batch in batches():
        other.before_replay()
        with other.captured():
            train(twin, other, [batch])
    assert other.steps == optimizer.steps
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for ours, theirs in zip(other.kept_tensors(), optimizer.kept_tensors(), strict=True):
        assert torch.equal(ours, theirs)
    for name, mask in other.finish().items():
        assert torch.equal(mask, optimizer.finish()[name])
