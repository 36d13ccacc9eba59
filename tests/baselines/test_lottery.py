"""Lottery tickets: rounds, rewinding, learning rates and what is refused."""

import itertools

import pytest
import torch
from problems import BATCHES, batches, build, loss_on, sgd, train
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from torchcram import compressible_weights, sparsity
from torchcram.baselines import LotteryTickets


def tickets(model, base=None, **options):
    options = {"round_steps": 6, "rewind_step": 3, "rounds": 3, **options}
    return LotteryTickets(model, base or sgd(model), "global:0.75", **options)


def test_rounds_positions_and_the_number_of_steps():
    optimizer = tickets(build(), round_steps=5, rewind_step=2, rounds=3)
    assert optimizer.total_steps == 2 + 3 * 3
    steps = range(optimizer.total_steps + 2)
    assert [optimizer.round_at(step) for step in steps] == [0] * 5 + [1] * 3 + [2] * 5
    positions = [0, 1, 2, 3, 4, 2, 3, 4, 2, 3, 4, 5, 6]
    assert [optimizer.position(step) for step in steps] == positions
    assert [optimizer.sparsity_of(index) for index in range(3)] == [0, 0.5, 0.75]


def test_a_rewind_to_step_0_repeats_whole_trainings():
    optimizer = tickets(build(), round_steps=4, rewind_step=0, rounds=3)
    assert optimizer.total_steps == 12
    assert [optimizer.position(step) for step in range(12)] == [0, 1, 2, 3] * 3
    model = build()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = tickets(model, torch.optim.SGD(model.parameters(), 0.0), rewind_step=0)
    train(model, optimizer, batches())
    for name, value in model.state_dict().items():
        mask = optimizer.masks.get(name, torch.tensor(True))
        assert torch.equal(value, first[name].masked_fill(~mask, 0))


@pytest.mark.parametrize("target", [0.1, 0.2, 0.36, 0.5, 0.9, 0.95])
def test_by_default_no_round_drops_more_than_a_fifth(target):
    model = build()
    options = {"round_steps": 6, "rewind_step": 3}
    optimizer = LotteryTickets(model, sgd(model), f"global:{target}", **options)
    kept = [1 - optimizer.sparsity_of(index) for index in range(optimizer.rounds)]
    assert kept[0] == 1
    assert kept[-1] == 1 - target
    assert all(after >= 0.8 * before - 1e-9 for before, after in itertools.pairwise(kept))
    fewer = (1 - target) ** (1 / max(optimizer.rounds - 2, 1))
    assert optimizer.rounds == 2 or fewer < 0.8


def test_weights_grow_sparser_round_by_round():
    model = build()
    optimizer = tickets(model)
    levels = []
    for batch in batches():
        train(model, optimizer, [batch])
        levels.append(sparsity(compressible_weights(model)))
    assert levels == [0] * 6 + [0.5] * 3 + [0.75] * 3
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masks = optimizer.finish()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(torch.equal(masks[name], optimizer.masks[name]) for name in masks)


def test_a_ticket_is_pruned_further_when_training_ends_early():
    model = build()
    optimizer = tickets(model)
    train(model, optimizer, batches()[:9])
    optimizer.finish()
    assert sparsity(compressible_weights(model)) == 0.75


def build_with_batchnorm(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))


def test_buffers_are_rewound():
    model = build_with_batchnorm()
    optimizer = tickets(model)
    train(model, optimizer, batches()[:3])
    early = {name: value.clone() for name, value in model.named_buffers()}
    train(model, optimizer, batches()[3:6])
    assert int(model[1].num_batches_tracked) == 6
    with optimizer.compressed():  # round 1 has begun
        for name, value in model.named_buffers():
            assert torch.equal(value, early[name])
        assert not torch.equal(model[1].running_mean, torch.zeros(16))


@pytest.mark.parametrize("cut", [2, 5, 6, 9])
def test_a_model_with_buffers_resumes_bit_for_bit(cut):
    model = build_with_batchnorm()
    train(model, tickets(model), batches())
    first = build_with_batchnorm()
    before = tickets(first)
    train(first, before, batches()[:cut])
    second = build_with_batchnorm(seed=5)
    after = tickets(second)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    train(second, after, batches()[cut:])
    for name, value in second.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_the_learning_rate_begins_again_with_every_round():
    model = build()
    optimizer = tickets(model)
    scheduler = LambdaLR(optimizer, lambda step: 1 - optimizer.position(step) / 6)
    rates = []
    for batch in batches():
        rates.append(optimizer.param_groups[0]["lr"])
        assert optimizer.round_position == optimizer.position(len(rates) - 1)
        train(model, optimizer, [batch])
        scheduler.step()
    assert optimizer.steps == optimizer.total_steps == BATCHES
    expected = [0.1 * (1 - position / 6) for position in [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5]]
    assert rates == pytest.approx(expected)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0)


def test_a_schedule_per_round_equals_trainings_one_after_another():
    def rate(position):
        return 1 - position / 6

    model = build()
    optimizer = tickets(model)
    scheduler = LambdaLR(optimizer, lambda step: rate(optimizer.position(step)))
    data = batches()
    for batch in data[:9]:
        train(model, optimizer, [batch])
        scheduler.step()

    early = build()
    base = sgd(early)
    plain = LambdaLR(base, rate)
    for batch in data[:3]:
        train(early, base, [batch])
        plain.step()
    with torch.no_grad():
        for name, mask in optimizer.masks.items():
            early.get_parameter(name).mul_(mask)
    base = sgd(early)
    plain = LambdaLR(base, lambda step: rate(step + 3))
    for batch in data[6:9]:
        base.zero_grad()
        loss_on(early, batch).backward()
        for name, mask in optimizer.masks.items():
            early.get_parameter(name).grad.mul_(mask)
        base.step()
        plain.step()
    for ours, theirs in zip(model.parameters(), early.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_step_without_a_pass_of_its_own_is_refused():
    model = build()
    optimizer = tickets(model)
    loss_on(model, batches()[0]).backward()
    with pytest.raises(RuntimeError, match=r"step\(\) may rewind the weights"):
        optimizer.step()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"round_steps": 0}, "round_steps must be at least 1, got 0"),
        ({"rewind_step": 6}, r"rewind_step must be in \[0, 6\), below round_steps, got 6"),
        ({"rewind_step": -1}, r"rewind_step must be in \[0, 6\), below round_steps, got -1"),
        ({"rounds": 1}, "rounds must be at least 2, the first of them dense, got 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tickets(build(), **arguments)
