"""Passes on parts of a batch on several ranks: those of one process on the union of the parts."""

from contextlib import nullcontext

import pytest
import torch
from nets import mlp
from ranks import assert_same_on_all_ranks, run_ranks
from shards import batches, network, rows_here, shard, whole_state
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from torchcram import C_SAM, CRAM_PLUS, CrAM, split_batch

RANKS = 2
OPERATORS = ("global:0.5", "uniform:0.7", "nm:2:4")
SHARES = [(1.0, 0.5), (0.5, 0.5)]


def optimizer_for(model, rule=CRAM_PLUS, kind=CrAM):
    parameters = [p for p in model.parameters() if p.requires_grad]
    base = SGD(parameters, lr=0.1, momentum=0.9)
    return kind(model, base, OPERATORS, rho=0.05, rule=rule, seed=3)


def split_on_ranks(batch, shares):
    """The parts of every rank for the two passes."""
    chunks = (values.chunk(RANKS) for values in batch)
    return [split_batch(part, *shares) for part in zip(*chunks, strict=True)]


def united(pairs):
    """The union of parts, for each of the two passes."""
    return [
        tuple(torch.cat(values) for values in zip(*parts, strict=True))
        for parts in zip(*pairs, strict=True)
    ]


def take_step(model, optimizer, micro_batches, no_sync=nullcontext):
    """Takes a step on micro-batches that are split; returns what was not zero at w~."""
    optimizer.zero_grad()
    backward(model, [dense for dense, _ in micro_batches], no_sync)
    masks = []
    for _ in optimizer.rule.passes:
        with optimizer.compressed():
            masks.append({name: local(w) != 0 for name, w in optimizer.weights.items()})
            backward(model, [compressed for _, compressed in micro_batches], no_sync)
    optimizer.step()
    return masks


def backward(model, parts, no_sync):
    for number, (x, y) in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else no_sync():
            (cross_entropy(model(x), y) / len(parts)).backward()


def local(weight):
    return (weight.to_local() if hasattr(weight, "to_local") else weight).detach().clone()


def close(ours, theirs, what):
    for name, value in whole_state(ours).items():
        expected = theirs.get_parameter(name).detach()
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-8, msg=f"{what}: {name}")


def _ddp(rank, model, kind=CrAM):
    """Two micro-batches a step; one process takes the union of both as one batch."""
    for shares, rule in zip(SHARES, (CRAM_PLUS, C_SAM), strict=True):
        alone, ours = model(), model()
        wrapped = DistributedDataParallel(ours)
        one, several = optimizer_for(alone, rule, kind), optimizer_for(wrapped, rule, kind)
        generator = torch.Generator().manual_seed(5)
        for _ in range(4):
            micro = []
            for _ in range(2):
                x = torch.randn(16, 8, generator=generator, dtype=torch.float64)
                micro.append((x, torch.randint(4, (16,), generator=generator)))
            parts = [split_on_ranks(batch, shares) for batch in micro]
            take_step(alone, one, [united(map(united, parts))])
            take_step(wrapped, several, [part[rank] for part in parts], wrapped.no_sync)
        close(ours, alone, f"DDP {kind.__name__} {shares}")
        assert_same_on_all_ranks({n: p.detach() for n, p in ours.named_parameters()})


def _fsdp(rank):
    for shares in SHARES:
        alone = network()
        sharded = shard(alone)
        one, several = optimizer_for(alone), optimizer_for(sharded)
        for batch in batches(3):
            parts = split_on_ranks(batch, shares)
            expected = take_step(alone, one, [united(parts)])
            masks = take_step(sharded, several, [parts[rank]])
            for name, mask in expected[0].items():
                rows = rows_here(mask, sharded.get_parameter(name))
                assert torch.equal(masks[0][name], rows), name
        close(sharded, alone, f"FSDP2 {shares}")
        assert_same_on_all_ranks(whole_state(sharded))


def _plain():
    torch.manual_seed(0)
    return mlp().double()


def _adapters():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
    return get_peft_model(_plain(), config).double()


def _networks(rank):
    _ddp(rank, _plain)
    _fsdp(rank)


def _lora(rank):
    from torchcram.integrations.peft import LoraCrAM

    _ddp(rank, _adapters, LoraCrAM)


def test_ranks_split_their_parts_of_a_batch():
    assert run_ranks(RANKS, _networks) == RANKS


@pytest.mark.slow  # peft and what it imports, in every process
def test_ranks_with_adapters_split_their_parts_of_a_batch():
    pytest.importorskip("peft")
    assert run_ranks(RANKS, _lora) == RANKS
