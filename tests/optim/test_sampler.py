"""What a step is to be."""

import torch
from nets import ConvNet

from torchcram import GlobalTopK, Quantize, compressible_weights
from torchcram.optim.sampler import OperatorSampler, StepPlan

OPERATORS = (GlobalTopK(0.5), GlobalTopK(0.9), Quantize(4))


def test_possible_draws_are_those_that_come():
    for interval, plain in ((1, 0.0), (1, 0.3), (3, 0.0), (3, 0.3)):
        draws = OperatorSampler(OPERATORS, interval, seed=0)
        assert {draws.draw(plain) for _ in range(300)} == set(draws.possible(plain))
    draws = OperatorSampler((), 1, seed=0)
    assert draws.draw(0.0) == StepPlan()
    assert draws.possible(0.0) == [StepPlan()]


def test_masks_are_computed_anew_at_every_so_many_uses_of_an_operator():
    draws = OperatorSampler(OPERATORS[:1], 3, seed=0)
    assert [draws.draw(0.0).anew for _ in range(7)] == [
        True,
        False,
        False,
        True,
        False,
        False,
        True,
    ]


def test_an_arranged_step_leaves_the_draws_alone():
    draws, twin = OperatorSampler(OPERATORS, 2, seed=5), OperatorSampler(OPERATORS, 2, seed=5)
    arranged = StepPlan(operator=OPERATORS[1], level=OPERATORS[1], anew=False)
    with draws.force(arranged):
        assert [draws.draw(0.5) for _ in range(3)] == 3 * [arranged]
    assert [draws.draw(0.5) for _ in range(20)] == [twin.draw(0.5) for _ in range(20)]


def test_masks_that_are_used_again_stay_where_they_are():
    weights = compressible_weights(ConvNet())
    draws = OperatorSampler(OPERATORS[:1], 2, seed=0)
    start = draws.state_dict()
    first = draws.compress_(draws.draw(0.0), weights, at=1)
    draws.rewind(start, weights)
    with torch.no_grad():
        for weight in weights.values():
            weight.normal_()
    second = draws.compress_(draws.draw(0.0), weights, at=1)
    assert {n: m.data_ptr() for n, m in first.items()} == {
        n: m.data_ptr() for n, m in second.items()
    }
    again = draws.compress_(draws.draw(0.0), weights, at=1)
    assert again is second
