"""Methods of `torchcram.baselines` on several ranks: alike under DDP, as one process under FSDP."""

import pytest
import torch
from ranks import assert_same_on_all_ranks, run_ranks
from shards import batches, network, ours, rows_here, shard, train, whole_state
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from torchcram.baselines import (
    SFW,
    CompressionAwareSFW,
    GradualObs,
    LotteryTickets,
    SparsitySchedule,
)

RANKS = 2
SCHEDULE = SparsitySchedule(begin=1, end=4, interval=2)


def tickets(model):
    base = SGD(model.parameters(), 0.1, momentum=0.9)
    return LotteryTickets(model, base, "global:0.8", round_steps=4, rewind_step=2, rounds=3)


def methods(model):
    base = SGD(model.parameters(), 0.1, momentum=0.9)
    yield lambda: SFW(model, base, "global:0.8")
    yield lambda: CompressionAwareSFW(model, base, "global:0.8")
    yield lambda: GradualObs(model, base, "global:0.8", schedule=SCHEDULE)


def _ranks_stay_alike(rank):
    for number in range(4):
        model = DistributedDataParallel(network(torch.float32), find_unused_parameters=True)
        kinds = [*methods(model), lambda model=model: tickets(model)]
        optimizer = kinds[number]()
        torch.manual_seed(rank)
        train(model, optimizer, [ours(batch) for batch in batches(8, dtype=torch.float32)])
        optimizer.finish()
        assert_same_on_all_ranks(dict(model.named_parameters()))


def test_ranks_stay_alike_under_ddp():
    assert run_ranks(RANKS, _ranks_stay_alike) == RANKS


def _tickets_of_shards(_):
    whole = network()
    sharded = shard(whole)
    alone, together = tickets(whole), tickets(sharded)
    for batch in batches(8):
        train(whole, alone, [batch])
        train(sharded, together, [ours(batch)])
    parameters = dict(sharded.named_parameters())
    for name, mask in alone.finish().items():
        assert torch.equal(together.finish()[name], rows_here(mask, parameters[name])), name
    for name, value in whole_state(sharded).items():
        torch.testing.assert_close(value, whole.get_parameter(name), msg=name)
    for method in methods(sharded):
        with pytest.raises(ValueError, match="needs whole weights on every rank"):
            method()


def test_tickets_of_shards_are_those_of_one_process_and_others_are_refused():
    assert run_ranks(RANKS, _tickets_of_shards) == RANKS
