"""What people use beside an optimizer: checkpointed activations, EMA, groups, schedulers."""

import copy

import pytest
import torch
from nets import RULES, ConvNet, closure_for, images, mlp, same, snapshot
from torch import distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from torchcram import (
    CRAM_PLUS,
    SAM,
    CrAM,
    GlobalTopK,
    compress,
    compressible_weights,
    frozen_statistics,
    sparsity,
    tune_batchnorm_,
)

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
kinds = pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])


class Checkpointed(nn.Module):
    """Batch norm and dropout in a block whose activations are computed anew in backward."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.reentrant = reentrant  # None: nothing is checkpointed
        self.first = nn.Conv2d(4, 8, 3)
        self.block = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.last = nn.Linear(8, 5)

    def forward(self, x):
        x = self.first(x)
        if self.reentrant is None:
            x = self.block(x)
        else:
            x = checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.last(x.mean((2, 3)))


def buffers(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def build(model, rule=CRAM_PLUS, operators="global:0.5", **options):
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return CrAM(model, base, operators, rule=rule, rho=0.1, **options)


@rules
@kinds
def test_statistics_are_those_of_plain_training_with_checkpointing(rule, reentrant):
    model = Checkpointed(reentrant)
    plain = copy.deepcopy(model)
    optimizer, base = build(model, rule), SGD(plain.parameters(), lr=0.0)
    optimizer.param_groups[0]["lr"] = 0.0
    for number in range(1, 4):
        batch = images()
        optimizer.step(closure_for(model, optimizer, batch))
        closure_for(plain, base, batch)()
        assert same(buffers(model), buffers(plain))
        # torch itself counts a batch twice: once in forward, once when it computes it anew
        assert model.block[0].num_batches_tracked == 2 * number


@kinds
def test_the_compressed_pass_leaves_statistics_alone_also_when_it_computes_anew(reentrant):
    model, batch = Checkpointed(reentrant), images()
    optimizer = build(model)
    closure_for(model, optimizer, batch)()
    before = buffers(model)
    with optimizer.compressed():
        cross_entropy(model(batch[0]), batch[1]).backward()
        assert same(buffers(model), before)
    assert same(buffers(model), before)


@rules
@kinds
@pytest.mark.parametrize("replay", [False, True], ids=["", "replayed"])
def test_checkpointing_does_not_change_the_step_dropout_included(rule, reentrant, replay):
    ends, batches = [], [images() for _ in range(3)]
    for kind in (None, reentrant):
        torch.manual_seed(1)
        model = Checkpointed(kind)
        optimizer = build(model, rule, replay_randomness=replay)
        for batch in batches:
            optimizer.step(closure_for(model, optimizer, batch))
        ends.append(dict(model.named_parameters()))
    assert same(*ends)


def test_an_average_beside_the_optimizer_is_that_of_a_loop_by_hand():
    model = ConvNet()
    twin = copy.deepcopy(model)
    ours, theirs = build(model), build(twin)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    by_hand = None
    for _ in range(5):
        batch = images()
        ours.step(closure_for(model, ours, batch))
        average.update_parameters(model)
        theirs.step(closure_for(twin, theirs, batch))
        now = {name: p.detach().clone() for name, p in twin.named_parameters()}
        by_hand = now if by_hand is None else {n: 0.8 * by_hand[n] + 0.2 * now[n] for n in now}
    for name, value in average.module.named_parameters():
        torch.testing.assert_close(value, by_hand[name], rtol=1e-5, atol=1e-7)
    assert same(snapshot(model), snapshot(twin))  # and training does not notice


def test_an_average_by_a_hook_sees_weights_after_the_step():
    model = ConvNet()
    optimizer, average = build(model), AveragedModel(model, avg_fn=lambda _, now, __: now)
    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    for _ in range(3):
        optimizer.step(closure_for(model, optimizer, images()))
        assert same(dict(average.module.named_parameters()), dict(model.named_parameters()))


def test_the_average_is_compressed_and_its_statistics_tuned():
    model = ConvNet()
    optimizer, average = build(model), AveragedModel(model)
    for _ in range(4):
        optimizer.step(closure_for(model, optimizer, images()))
        average.update_parameters(model)
    twin, batches = copy.deepcopy(average), [images() for _ in range(3)]
    tune_batchnorm_(average, batches)
    update_bn(batches, twin)  # torch's own, the same for a net without dropout
    for name, value in buffers(twin).items():
        torch.testing.assert_close(buffers(average)[name], value)
    small = compress(average.module, "global:0.9")
    assert sparsity(compressible_weights(small)) == pytest.approx(0.9, abs=0.01)
    assert sparsity(compressible_weights(average.module)) == 0


def test_every_group_has_its_own_learning_rate_and_rho():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    groups = [
        {"params": model[0].parameters(), "lr": 0.5, "rho": 0.3},
        {"params": [model[2].weight], "lr": 0.01},
        {"params": [model[2].bias], "rho": 0.0},
    ]
    optimizer = CrAM(model, SGD(groups, lr=0.1), "global:0.5", rho=0.05)
    point, moves = copy.deepcopy(model), {}
    closure_for(model, optimizer, batch)()
    g = {name: p.grad.clone() for name, p in model.named_parameters()}
    rho = {"0.weight": 0.3, "0.bias": 0.3, "2.weight": 0.05, "2.bias": 0.0}
    lr = {"0.weight": 0.5, "0.bias": 0.5, "2.weight": 0.01, "2.bias": 0.1}
    with torch.no_grad():
        for name, parameter in point.named_parameters():
            parameter.add_(g[name], alpha=rho[name])
        masks = GlobalTopK(0.5).compress_(compressible_weights(point))
    cross_entropy(point(batch[0]), batch[1]).backward()
    for name, parameter in point.named_parameters():
        kept = masks[name] if name in masks else torch.ones(())
        moves[name] = lr[name] * (parameter.grad * kept + g[name])
    before = snapshot(model)
    optimizer.step(closure_for(model, optimizer, batch))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name] - moves[name], rtol=1e-5, atol=1e-7)


SCHEDULERS = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, total_iters=4),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 6)], milestones=[3]
    ),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:.*epoch parameter")
def test_schedulers_do_on_the_wrapper_what_they_do_on_the_base(kind):
    def settings(wrapped):
        torch.manual_seed(0)
        model = mlp()
        groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters()}]
        base = SGD(groups, lr=0.1, momentum=0.9)
        optimizer = CrAM(model, base, "global:0.5") if wrapped else base
        scheduler, seen = SCHEDULERS[kind](optimizer), []
        for _ in range(7):
            batch = torch.randn(6, 8), torch.randint(4, (6,))
            optimizer.step(closure_for(model, optimizer, batch))
            seen += [(group["lr"], group["momentum"]) for group in base.param_groups]
            scheduler.step(*[1.0] * (kind == "ReduceLROnPlateau"))
        return seen

    assert settings(wrapped=True) == settings(wrapped=False)
    assert len(set(settings(wrapped=True))) > 2


@rules
@pytest.mark.parametrize("trained", ["all", "the others"])
def test_what_is_frozen_is_compressed_but_neither_ascends_nor_moves(rule, trained):
    """Compression is of the whole model, whoever trains it: it will be deployed as a whole."""
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    model[0].requires_grad_(False)
    parameters = model.parameters() if trained == "all" else model[2].parameters()
    optimizer = CrAM(model, SGD(parameters, lr=0.1), "uniform:0.5", rule=rule, rho=0.3)
    before = snapshot(model)
    closure_for(model, optimizer, batch)()
    for _ in rule.passes:
        with optimizer.compressed():
            weight, old = model[0].weight, before["0.weight"]
            assert weight.eq(0).sum() == (0 if rule is SAM else 64)
            assert torch.equal(weight[weight != 0], old[weight != 0])  # no ascent
            assert torch.equal(model[0].bias, before["0.bias"])
            cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


def test_a_choice_of_weights_leaves_frozen_ones_dense():
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    model[0].requires_grad_(False)
    weights = {n: w for n, w in compressible_weights(model).items() if w.requires_grad}
    optimizer = CrAM(model, SGD(model[2].parameters(), lr=0.1), "global:0.5", weights=weights)
    closure_for(model, optimizer, batch)()
    with optimizer.compressed():
        assert model[0].weight.ne(0).all()
        assert model[2].weight.eq(0).sum() == 32
        cross_entropy(model(batch[0]), batch[1]).backward()


@rules
def test_what_is_unfrozen_and_added_later_ascends_and_moves(rule):
    model, batch = mlp(), (torch.randn(6, 8), torch.randint(4, (6,)))
    model[0].requires_grad_(False)
    optimizer = CrAM(model, SGD(model[2].parameters(), lr=0.1), "global:0.5", rule=rule, rho=0.3)
    optimizer.step(closure_for(model, optimizer, batch))
    frozen = snapshot(model)["0.bias"]
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.2, "rho": 0.1})
    closure_for(model, optimizer, batch)()
    for _ in rule.passes:
        with optimizer.compressed():
            last, moved = optimizer._step_state.passes == [rule.passes[-1]], model[0].bias != frozen
            assert not last or bool(moved.any()) == rule.passes[-1].ascend
            cross_entropy(model(batch[0]), batch[1]).backward()
    assert torch.equal(model[0].bias, frozen)
    optimizer.step()
    assert not torch.equal(model[0].bias, frozen)


def test_synchronised_batch_norm_freezes_by_its_type():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet())
    assert isinstance(model.bn1, nn.SyncBatchNorm)
    with frozen_statistics(model):
        assert not model.bn1.track_running_stats
        assert not model.bn2.track_running_stats
    assert model.bn1.track_running_stats


@pytest.mark.gpu
@rules
def test_synchronised_batch_norm_on_cuda(rule, tmp_path):
    meet = (tmp_path / "meet").as_uri()
    dist.init_process_group("nccl", init_method=meet, rank=0, world_size=1)
    try:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(ConvNet()).cuda()
        plain = copy.deepcopy(model)
        optimizer = CrAM(model, SGD(model.parameters(), lr=0.0), "global:0.5", rule=rule)
        for number in range(1, 4):
            batch = tuple(part.cuda() for part in images())
            optimizer.step(closure_for(model, optimizer, batch))
            plain(batch[0])
            assert model.bn1.num_batches_tracked == number
            for name, value in buffers(plain).items():
                torch.testing.assert_close(buffers(model)[name], value)
    finally:
        dist.destroy_process_group()
