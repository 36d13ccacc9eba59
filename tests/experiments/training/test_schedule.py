import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR

from torchcram.experiments.training.schedule import lr_at, set_lr_


def config(name="cosine", warmup_epochs=2):
    return SimpleNamespace(name=name, warmup_epochs=warmup_epochs)


def by_torch(scheduler_of, steps, lr):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    scheduler = scheduler_of(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize(("per_epoch", "warmup", "epochs"), [(7, 2, 10), (1, 3, 5), (10, 0, 3)])
def test_it_is_linear_and_then_cosine_as_in_torch(per_epoch, warmup, epochs):
    rising = per_epoch * warmup
    expected = []
    if rising:
        linear = lambda o: LinearLR(o, 1 / rising, total_iters=rising - 1)  # noqa: E731
        expected += by_torch(linear, rising, 0.2)
    falling = per_epoch * epochs - rising
    expected += by_torch(lambda o: CosineAnnealingLR(o, falling), falling, 0.2)
    found = [
        lr_at(step, per_epoch, config(warmup_epochs=warmup), lr=0.2, epochs=epochs)
        for step in range(per_epoch * epochs)
    ]
    assert found == pytest.approx(expected)


def test_it_begins_above_zero_peaks_once_warm_and_ends_at_zero():
    at = [lr_at(step, 10, config(), lr=0.1, epochs=5) for step in range(51)]
    assert at[0] == pytest.approx(0.1 / 20)
    assert at[19] == at[20] == pytest.approx(0.1) == max(at)
    assert at[35] == pytest.approx(0.05)
    assert at[50] == pytest.approx(0, abs=1e-15)
    assert at[20:] == sorted(set(at[20:]), reverse=True)


def test_constant_stays_at_the_peak_after_the_warm_up():
    at = [lr_at(step, 3, config("constant", 1), lr=0.1, epochs=3) for step in range(9)]
    assert at == pytest.approx([0.1 / 3, 0.2 / 3, *[0.1] * 7])


@pytest.mark.parametrize("warmup", [2, 5])
def test_a_training_that_is_all_warm_up_only_rises(warmup):
    at = [lr_at(step, 3, config(warmup_epochs=warmup), lr=1.0, epochs=2) for step in range(7)]
    assert at == sorted(at)
    assert math.isclose(at[5], 6 / (3 * warmup))


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="'stairs': allowed are 'cosine', 'linear', 'constant'"):
        lr_at(5, 1, config("stairs", 0), lr=0.1, epochs=3)


def test_the_rate_reaches_every_group_and_a_tensor_stays_the_same_one():
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    rate = torch.tensor(1.0)
    optimizer = SGD([{"params": parameters[:1]}, {"params": parameters[1:], "lr": rate}], lr=1.0)
    set_lr_(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.param_groups[1]["lr"] is rate
    assert float(rate) == 0.25
