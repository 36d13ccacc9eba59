"""Distributed data parallel: gradients are averaged before the ascent, ranks stay alike."""

import copy
import itertools

import torch
from ranks import assert_same_on_all_ranks, run_ranks
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK_PLUS, CrAM

RANKS = 2
OPERATORS = ("global:0.5", "uniform:0.7", "nm:2:4", "int4", "global:0.3-0.9")
OPTIONS = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "buckets": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
}
RULES = {rule.name: rule for rule in (SAM, CRAM, CRAM_PLUS, C_SAM, TOPK_PLUS)}


class Net(nn.Module):
    """A net with a part that the loss may leave out."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)
        self.other = nn.Linear(16, 4)

    def forward(self, x, other=False):
        x = self.body(x)
        return self.other(x) if other else self.head(x)


def network():
    torch.manual_seed(0)
    net = Net()
    for parameter in net.other.parameters():
        parameter.requires_grad_(False)
    return net


def batches(steps, per_rank=8):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(steps, RANKS * per_rank, 8, generator=generator)
    return inputs, torch.randint(4, (steps, RANKS * per_rank), generator=generator)


def optimizer_for(model, module, rule=CRAM_PLUS, base=SGD, **options):
    parameters = [p for p in module.parameters() if p.requires_grad]
    kind = {"lr": 0.1, "momentum": 0.9} if base is SGD else {"lr": 0.01}
    operators = OPERATORS if rule.compresses else ()
    return CrAM(model, base(parameters, **kind), operators, rho=0.05, rule=rule, seed=3, **options)


def part(values, rank):
    return values.chunk(RANKS)[rank]


def train(model, optimizer, inputs, labels):
    for x, y in zip(inputs, labels, strict=True):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def close(one, other):
    for (name, ours), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def _every_option(rank):
    inputs, labels = batches(50)
    ours = [part(x, rank) for x in inputs], [part(y, rank) for y in labels]
    single = network()
    train(single, optimizer_for(single, single), inputs, labels)
    for name, options in OPTIONS.items():
        module = network()
        model = DistributedDataParallel(module, **options)
        optimizer = optimizer_for(model, module)
        torch.manual_seed(100 + rank)  # other random numbers on every rank
        train(model, optimizer, *ours)
        assert_same_on_all_ranks({f"{name}: {k}": v for k, v in module.state_dict().items()})
        if name == "plain":
            plain = module
        close(module, plain)
    # the same training as in one process, up to the order of sums
    few, same = network(), network()
    train(few, optimizer_for(few, few), inputs[:4], labels[:4])
    model = DistributedDataParallel(same)
    train(model, optimizer_for(model, same), ours[0][:4], ours[1][:4])
    close(same, few)


def test_every_option_of_ddp_trains_alike():
    assert run_ranks(RANKS, _every_option) == RANKS


def _every_rule(rank):
    inputs, labels = batches(12)
    ours = [part(x, rank) for x in inputs], [part(y, rank) for y in labels]
    for rule, base in itertools.product(RULES.values(), (SGD, AdamW)):
        module = network()
        model = DistributedDataParallel(module, gradient_as_bucket_view=True)
        optimizer = optimizer_for(model, module, rule, base, mask_interval=2)
        torch.manual_seed(100 + rank)
        train(model, optimizer, *ours)
        assert_same_on_all_ranks({f"{rule.name}: {k}": v for k, v in module.state_dict().items()})


def test_ranks_stay_alike_under_every_rule():
    assert run_ranks(RANKS, _every_rule) == RANKS


def _accumulation(rank):
    """Two micro-batches a pass, the first of them without talking to the others."""
    inputs, labels = batches(6)
    for options in ({}, {"gradient_as_bucket_view": True}):
        module = network()
        model = DistributedDataParallel(module, **options)
        optimizer = optimizer_for(model, module)
        for x, y in zip(inputs, labels, strict=True):
            micro = list(zip(part(x, rank).chunk(2), part(y, rank).chunk(2), strict=True))

            def backward(micro=micro, model=model):
                with model.no_sync():
                    (cross_entropy(model(micro[0][0]), micro[0][1]) / 2).backward()
                (cross_entropy(model(micro[1][0]), micro[1][1]) / 2).backward()

            optimizer.zero_grad()
            backward()
            with optimizer.compressed():
                backward()
            optimizer.step()
        assert_same_on_all_ranks(dict(module.state_dict()))
        whole = network()
        twin = DistributedDataParallel(whole, **options)
        train(
            twin,
            optimizer_for(twin, whole),
            [part(x, rank) for x in inputs],
            [part(y, rank) for y in labels],
        )
        close(module, whole)


def test_micro_batches_without_synchronisation():
    assert run_ranks(RANKS, _accumulation) == RANKS


def _state_and_nan(rank):
    inputs, labels = batches(8)
    ours = [part(x, rank) for x in inputs], [part(y, rank) for y in labels]
    module = network()
    model = DistributedDataParallel(module)
    optimizer = optimizer_for(model, module)
    train(model, optimizer, ours[0][:4], ours[1][:4])
    saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
    train(model, optimizer, ours[0][4:], ours[1][4:])

    again = network()
    model = DistributedDataParallel(again)
    optimizer = optimizer_for(model, again)
    again.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer, ours[0][4:], ours[1][4:])
    for name, value in again.state_dict().items():
        assert torch.equal(value, module.state_dict()[name]), name

    # a NaN on one rank is an error on all, and the weights stay
    before = copy.deepcopy(again.state_dict())
    bad = ours[0][0].clone()
    if rank == 1:
        bad[0] = torch.nan
    try:
        train(model, optimizer, [bad], ours[1][:1])
    except FloatingPointError:
        raised = True
    else:
        raised = False
    assert raised
    for name, value in again.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_resume_and_a_nan_on_one_rank():
    assert run_ranks(RANKS, _state_and_nan) == RANKS
