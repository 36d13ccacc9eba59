"""Methods on shards of FSDP2: those of one process, or a clear refusal."""

import pytest
import torch
from ranks import assert_same_on_all_ranks, run_ranks
from shards import batches, network, ours, shard, train, whole_state
from torch.optim import SGD, AdamW

from torchcram.baselines import L0, PLATON, STR, Movement, SoftMovement, SparsitySchedule

SCHEDULE = SparsitySchedule(begin=1, end=4, interval=1, initial=0.1)
METHODS = {
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


def _like_one_process(rank):
    data = batches(7)
    for method, wrap in METHODS.items():
        for base in (SGD, AdamW):
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


def test_methods_on_shards_are_those_of_one_process():
    assert run_ranks(2, _like_one_process) == 2


def test_methods_that_need_whole_weights_refuse_shards():
    assert run_ranks(2, _refuse) == 2
