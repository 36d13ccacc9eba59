"""Save, load, continue: on as many processes bit for bit, on others to rounding."""

import copy

import pytest
import torch
from ranks import run_ranks
from shards import batches, local_state, network, ours, replicated_shards, shard, train, whole_state
from torch.distributed import checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM_PLUS, CrAM
from torchcram.optim.checkpoint import TrainingState

OPERATORS = ("global:0.5", "uniform:0.7", "nm:2:4", "int4", "global:0.6+int8")
CASES = (  # rule, base optimizer, mask interval: every two of them together
    (CRAM_PLUS, SGD, 1),
    (CRAM_PLUS, AdamW, 3),
    (C_SAM, SGD, 3),
    (C_SAM, AdamW, 1),
)
BEFORE, AFTER = 5, 4


def build(model, rule, base, interval, seed=3):
    options = {"lr": 0.1, "momentum": 0.9} if base is SGD else {"lr": 0.01}
    inner = base(model.parameters(), **options)
    return CrAM(
        model,
        inner,
        OPERATORS,
        rule=rule,
        mask_interval=interval,
        base_step_probability=0.2,
        seed=seed,
    )


def folder_of(folder, case):
    rule, base, interval = case
    return folder / f"{rule.name}-{base.__name__}-{interval}"


def save(folder, model, optimizer):
    dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)


def load(folder, model, optimizer):
    dcp.load({"training": TrainingState(model, optimizer)}, checkpoint_id=folder)


def _save(rank, folder):
    """Trains, saves, goes on, and puts where that led next to the checkpoint."""
    data = [ours(batch) for batch in batches(BEFORE + AFTER)]
    for case in CASES:
        model = shard(network())
        optimizer = build(model, *case)
        train(model, optimizer, data[:BEFORE])
        save(folder_of(folder, case), model, optimizer)
        plain = copy.deepcopy(optimizer.state_dict())
        weights = local_state(model)
        train(model, optimizer, data[BEFORE:])

        again = shard(network())
        other = build(again, *case, seed=8)
        if case[1] is AdamW:
            load(folder_of(folder, case), again, other)
        else:  # by the methods of the optimizer alone
            with torch.no_grad():
                for name, parameter in again.named_parameters():
                    parameter.to_local().copy_(weights[name])
            other.load_state_dict(plain)
        train(again, other, data[BEFORE:])
        ends, expected = local_state(again), local_state(model)
        assert all(torch.equal(ends[n], expected[n]) for n in ends), case
        whole = whole_state(model)
        if rank == 0:
            torch.save(whole, folder_of(folder, case) / "end.pt")


def assert_ends_alike(model, folder):
    expected = torch.load(folder / "end.pt", weights_only=True)
    for name, value in whole_state(model).items():
        name = name.removeprefix("module.")
        torch.testing.assert_close(value, expected[name], rtol=1e-8, atol=1e-9)


def _load(_rank, folder, kinds):
    data = [ours(batch) for batch in batches(BEFORE + AFTER)][BEFORE:]
    for case in CASES:
        for kind in kinds:
            if kind == "DDP":
                model = DistributedDataParallel(network(), find_unused_parameters=True)
            else:
                model = shard(network(), replicated_shards() if kind == "HSDP" else None)
            optimizer = build(model, *case, seed=8)
            load(folder_of(folder, case), model, optimizer)
            train(model, optimizer, data)
            assert_ends_alike(model, folder_of(folder, case))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:TypedStorage is")
@pytest.mark.parametrize(
    ("ranks", "others", "back"),
    [(2, ("DDP",), "FSDP"), pytest.param(4, ("FSDP", "DDP"), "HSDP", marks=pytest.mark.slow)],
)
def test_ranks_save_and_others_go_on(tmp_path, ranks, others, back):
    assert run_ranks(ranks, _save, tmp_path) == ranks
    assert run_ranks(2, _load, tmp_path, others) == 2
    data = batches(BEFORE + AFTER)
    for case in CASES:
        folder = folder_of(tmp_path, case)
        model = network()
        optimizer = build(model, *case, seed=8)
        load(folder, model, optimizer)
        save(tmp_path / f"{folder.name}-single", model, optimizer)
        train(model, optimizer, data[BEFORE:])
        assert_ends_alike(model, folder)
        torch.save(
            {n: p.detach() for n, p in model.named_parameters()},
            tmp_path / f"{folder.name}-single" / "end.pt",
        )
    assert run_ranks(ranks, _back, tmp_path, back) == ranks


def _back(rank, folder, kind):
    """What one process saved goes on in shards."""
    (folder / "singles").mkdir(exist_ok=True)
    for case in CASES:
        link = folder / "singles" / folder_of(folder, case).name
        if rank == 0:
            link.symlink_to(folder / f"{link.name}-single")
    torch.distributed.barrier()
    _load(rank, folder / "singles", (kind,))
