"""Faults of one process are errors on all of them, within seconds, never a hang."""

import os
import time
import warnings

import pytest
import torch
from ranks import outcomes_of_ranks, run_ranks
from shards import batches, local_state, network, ours, replicated_shards, shard, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from torchcram import CRAM, CRAM_PLUS, CrAM
from torchcram.optim.rank_consistency import require_alike_everywhere


def parallel(kind, model):
    if kind == "DDP":
        return DistributedDataParallel(model, find_unused_parameters=True)
    return shard(model, replicated_shards() if kind == "HSDP" else None)


def build(model, *, base=SGD, rule=CRAM_PLUS, operators=("global:0.5", "nm:2:4"), **options):
    return CrAM(model, base(model.parameters(), lr=0.1), operators, rule=rule, **options)


def refusal(kind, other_rank, options, model=None):
    """What the constructor says where one rank is given something else."""
    if torch.distributed.get_rank() != other_rank:
        options, model = {}, None
    try:
        build(parallel(kind, model or network()), **options)
    except ValueError as error:
        return str(error)
    return "nothing"


DIFFERENCES = {
    "operators: nm:2:4 on rank{others}, none on rank 1": {"operators": ["global:0.5"]},
    "operators: global:0.5 on rank{others}, uniform:0.5 on rank 1": {"operators": ["uniform:0.5"]},
    "seeds: 0 on rank{others}, 7 on rank 1": {"seed": 7},
    "rho: 0.0 on rank{others}, 0.1 on rank 1": {"rho": 0.1},
    "options: mask_interval=1 on rank{others}, mask_interval=2 on rank 1": {"mask_interval": 2},
    "base optimizers: SGD on rank{others}, AdamW on rank 1": {"base": AdamW},
    "rules: UpdateRule(name='CrAM+'": {"rule": CRAM},
}


def _differences(kinds):
    others = {2: " 0", 4: "s 0, 2, 3"}[torch.distributed.get_world_size()]
    for kind in kinds:
        for says, options in DIFFERENCES.items():
            told = refusal(kind, 1, options)
            assert told.startswith("processes were given different "), told
            assert says.format(others=others) in told, (kind, told)
        build(parallel(kind, network()))  # no difference, no error
        if kind != "DDP":  # which compares models itself
            other = network()
            other.fc = nn.Linear(24, 6, dtype=torch.float64)
            told = refusal(kind, 1, {}, other)
            kept, wide = (f"fc.weight ({n}, 24) float64" for n in (5, 6))
            assert f"weights: {kept} on rank{others}, {wide} on rank 1" in told, told
            assert "parameters: " in told


def _nan_on_one(rank, kind):
    model = parallel(kind, network())
    optimizer = build(model)
    data = [ours(batch) for batch in batches(3)]
    train(model, optimizer, data[:2])
    before = local_state(model)
    if rank == 1:
        data[2][0][0] = torch.nan
    with pytest.raises(
        FloatingPointError, match=r"no step taken; in: .*conv\.weight.* and \d+ more"
    ):
        train(model, optimizer, data[2:])
    after = local_state(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def _two(rank):
    warnings.simplefilter("ignore")
    _differences(("DDP", "FSDP"))
    _nan_on_one(rank, "DDP")
    _nan_on_one(rank, "FSDP")


def test_different_things_given_and_a_nan_on_one_of_two_ranks():
    assert run_ranks(2, _two) == 2


def _four(rank):
    warnings.simplefilter("ignore")
    _differences(("HSDP",))
    _nan_on_one(rank, "HSDP")


@pytest.mark.slow
def test_different_things_given_and_a_nan_on_one_of_four_ranks():
    assert run_ranks(4, _four) == 4


def _another_model(rank):
    other = network()
    if rank == 1:
        other.fc = nn.Linear(24, 6, dtype=torch.float64)
    build(DistributedDataParallel(other))


def _dies(rank, kind):
    warnings.simplefilter("ignore")
    model = parallel(kind, network())
    optimizer = build(model)
    data = [ours(batch) for batch in batches(3)]
    train(model, optimizer, data[:2])
    if rank == 1:
        os._exit(3)
    began = time.monotonic()
    try:
        train(model, optimizer, data[2:])
    finally:
        if time.monotonic() - began > 20:
            raise TimeoutError


def test_another_model_under_ddp():
    """DDP itself compares models."""
    told = outcomes_of_ranks(2, _another_model, seconds=120)
    assert all(one.startswith("RuntimeError: ") for one in told), told
    assert any("[6, 24]" in one for one in told), told


@pytest.mark.parametrize("kind", ["DDP", "FSDP"])
def test_a_rank_that_dies(kind):
    told = outcomes_of_ranks(2, _dies, kind, seconds=120)
    assert told[1] is None
    assert told[0].startswith(("RuntimeError: ", "DistBackendError: ")), told


def _goes_on_for_ever(rank):
    if rank == 1:
        time.sleep(60)


@pytest.mark.parametrize("run", [run_ranks, outcomes_of_ranks])
def test_a_hang_is_a_failure(run):
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="after 4 s"):
        run(2, _goes_on_for_ever, seconds=4)
    assert time.monotonic() - began < 20


def _wrapped_later(rank):
    """A loop that wraps the model after the optimizer was made asks for the comparison itself."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 4)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    require_alike_everywhere(CrAM(model, base, "global:0.5"))
    with pytest.raises(ValueError, match=r"operators: .* on rank 0, .* on rank 1"):
        require_alike_everywhere(CrAM(model, base, ["global:0.9", "global:0.5"][rank]))


def test_a_model_that_is_wrapped_later():
    assert run_ranks(2, _wrapped_later) == 2
