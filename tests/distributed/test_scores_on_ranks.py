"""Methods on two ranks, with masks, scores or gates: as one process, or refused on shards."""

import pytest
import torch
from ranks import assert_same_on_all_ranks, run_ranks
from shards import batches, network, ours, shard, train, whole_state
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from torchcram.baselines import (
    ACDC,
    DPF,
    L0,
    PLATON,
    SRSTE,
    STR,
    GradualMagnitude,
    Movement,
    SoftMovement,
    SparsitySchedule,
)

SCHEDULE = SparsitySchedule(begin=1, end=4, interval=1, initial=0.1)
MASKS_ALONE = {
    "gradual magnitude": lambda model, base: GradualMagnitude(
        model, base, "global:0.6", schedule=SCHEDULE
    ),
    "DPF": lambda model, base: DPF(model, base, "uniform:0.6", schedule=SCHEDULE),
    "AC/DC": lambda model, base: ACDC(model, base, "global:0.6", warmup=1, period=2, end=6),
    "SR-STE": lambda model, base: SRSTE(model, base, "global:0.6", decay=0.1),
}
ON_SHARDS = {
    "movement": lambda model, base: Movement(
        model, base, "global:0.6", schedule=SCHEDULE, score_lr=0.1
    ),
    "uniform movement": lambda model, base: Movement(
        model, base, "uniform:0.6", schedule=SCHEDULE, score_lr=0.1
    ),
    "soft movement": lambda model, base: SoftMovement(
        model, base, "global:0.6", schedule=SCHEDULE, threshold=0.499, penalty=1.0, score_lr=0.1
    ),
    "PLATON": lambda model, base: PLATON(model, base, "global:0.6", schedule=SCHEDULE),
}
WHOLE = {
    "STR": lambda model, base: STR(model, base, "global:0.6", initial=-3.0),
    "l0": lambda model, base: L0(model, base, "uniform:0.6", penalty=10.0, gate_lr=0.1),
}


def _ddp(rank):
    data = batches(7)
    for method, wrap in {**WHOLE, **ON_SHARDS}.items():
        alone = network()
        one_process = wrap(alone, AdamW(alone.parameters(), lr=0.02))
        train(alone, one_process, data)
        one_process.finish()
        torch.manual_seed(rank)
        model = DistributedDataParallel(network(), find_unused_parameters=True)
        optimizer = wrap(model, AdamW(model.parameters(), lr=0.02))
        torch.manual_seed(100 + rank)
        train(model, optimizer, [ours(batch) for batch in data])
        optimizer.finish()
        parameters = {name: p.detach() for name, p in model.module.named_parameters()}
        assert_same_on_all_ranks({f"{method}: {n}": v for n, v in parameters.items()})
        for name, value in alone.named_parameters():
            torch.testing.assert_close(
                parameters[name], value.detach(), rtol=1e-6, atol=1e-8, msg=f"{method}: {name}"
            )


def _like_one_process(rank):
    data = batches(7)
    for method, wrap in {**MASKS_ALONE, **ON_SHARDS}.items():
        for base in (SGD,) if method in MASKS_ALONE else (SGD, AdamW):
            alone = network()
            sharded = shard(alone)
            one_process = wrap(alone, base(alone.parameters(), lr=0.02))
            train(alone, one_process, data)
            one_process.finish()
            optimizer = wrap(sharded, base(sharded.parameters(), lr=0.02))
            torch.manual_seed(100 + rank)
            train(sharded, optimizer, [ours(batch) for batch in data])
            optimizer.finish()
            expected = dict(alone.named_parameters())
            whole = whole_state(sharded)
            assert_same_on_all_ranks({f"{method}: {n}": v for n, v in whole.items()})
            for name, value in whole.items():
                assert torch.equal(value == 0, expected[name] == 0), (method, base, name)
                torch.testing.assert_close(
                    value, expected[name].detach(), rtol=1e-8, atol=1e-8, msg=f"{method}: {name}"
                )


def _refuse(_):
    for method in (STR, L0):
        model = shard(network())
        base = SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=f"{method.__name__} needs whole weights"):
            method(model, base, "global:0.5")
        assert len(base.param_groups) == 1


def test_ranks_under_ddp_do_what_one_process_does():
    assert run_ranks(2, _ddp) == 2


@pytest.mark.slow
def test_methods_on_shards_are_those_of_one_process():
    assert run_ranks(2, _like_one_process) == 2


def test_methods_that_need_whole_weights_refuse_shards():
    assert run_ranks(2, _refuse) == 2
