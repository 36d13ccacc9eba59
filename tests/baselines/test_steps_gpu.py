"""Steps between two selections of a mask do not wait for the GPU and agree with the CPU."""

import pytest
import torch
from problems import batches, build, sgd, train

from torchcram.baselines import (
    SFW,
    CompressionAwareSFW,
    GradualObs,
    LotteryTickets,
    SparsitySchedule,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*debug mode is a"),
]
METHODS = {
    "SFW": lambda model: SFW(model, sgd(model), "global:0.75"),
    "compression-aware SFW": lambda model: CompressionAwareSFW(model, sgd(model), "global:0.75"),
    "lottery tickets": lambda model: LotteryTickets(
        model, sgd(model), "global:0.75", round_steps=6, rewind_step=3, rounds=3
    ),
    "gradual OBS": lambda model: GradualObs(
        model,
        sgd(model),
        "global:0.75",
        schedule=SparsitySchedule(begin=6, end=9, interval=3, initial=0.5),
        gradients=2,
    ),
}
USUAL = {"rtol": 1e-4, "atol": 1e-5}
# two gradients make a Fisher matrix close to singular, whose inverse magnifies rounding
TOLERANCES = {"gradual OBS": {"rtol": 0.1, "atol": 2e-3}}
SELECTING = {"lottery tickets": (6, 9), "gradual OBS": (6, 9)}


@pytest.mark.parametrize("name", METHODS)
def test_steps_do_not_wait_and_agree_with_the_cpu(name):
    model, expected = build().cuda(), build()
    optimizer, other = METHODS[name](model), METHODS[name](expected)
    for step, batch in enumerate(batches()):
        there = tuple(part.cuda() for part in batch)

        def closure(there=there):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(there[0]), there[1])
            loss.backward()
            return loss

        torch.cuda.synchronize()
        waits = step < 2 or step in SELECTING.get(name, ())  # the first steps compile kernels
        try:
            torch.cuda.set_sync_debug_mode("default" if waits else "error")
            optimizer.step(closure)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        train(expected, other, [batch])
    for here, there in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(there.cpu() == 0, here == 0)
        torch.testing.assert_close(there.cpu(), here, **TOLERANCES.get(name, USUAL))
