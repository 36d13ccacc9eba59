"""Training with FSDP2: to rounding that of one process, whatever the options."""

import itertools

import pytest
import torch
from ranks import assert_same_on_all_ranks, run_ranks
from shards import (
    batches,
    local_state,
    network,
    ours,
    replicated_shards,
    shard,
    train,
    whole_of,
    whole_state,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK, TOPK_PLUS, CrAM

RULES = (SAM, CRAM, CRAM_PLUS, C_SAM, TOPK, TOPK_PLUS)
OPERATORS = ("global:0.5", "uniform:0.7", "nm:2:4", "int4", "global:0.3-0.9", "nm:2:4+int8:g4")


def optimizer_for(model, rule=CRAM_PLUS, base=SGD, *, operators=OPERATORS, lr=0.1, **options):
    parameters = [p for p in model.parameters() if p.requires_grad]
    inner = SGD(parameters, lr=lr, momentum=0.9) if base is SGD else AdamW(parameters, lr=lr / 10)
    operators = operators if rule.compresses else ()
    return CrAM(model, inner, operators, rule=rule, seed=3, **{"rho": 0.05, **options})


def assert_close(sharded, alone, what, tolerance=1e-8):
    expected = dict(alone.named_parameters())
    for name, value in whole_state(sharded).items():
        torch.testing.assert_close(
            value,
            expected[name].detach(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda told, name=name: f"{what}: {name}: {told}",
        )


def _like_one_process(rank, what, *, mesh=None, fsdp=None, prepare=None, **options):
    """Trains in one process and in shards; they stay alike."""
    data = batches(6)
    alone = network()
    sharded = shard(alone, mesh, **(fsdp or {}))
    if prepare is not None:
        prepare(alone)
        prepare(sharded)
    train(alone, optimizer_for(alone, **options), data)
    optimizer = optimizer_for(sharded, **options)
    torch.manual_seed(100 + rank)  # other random numbers on every rank
    train(sharded, optimizer, [ours(batch) for batch in data])
    assert_close(sharded, alone, what)
    assert_same_on_all_ranks({f"{what}: {n}": v for n, v in whole_state(sharded).items()})


def _freeze(model):
    for parameter in (model.up.weight, model.fc.bias, model.norm.weight):
        parameter.requires_grad_(False)


def _rules(rank):
    for rule, base in itertools.product(RULES, (SGD, AdamW)):
        _like_one_process(rank, f"{rule.name} {base.__name__}", rule=rule, base=base)


def _options(rank):
    kept = {"reshard_after_forward": False}
    _like_one_process(rank, "normalize", normalize=True)
    _like_one_process(rank, "bounded", max_ascent_norm=0.02, rho=1.0)
    _like_one_process(rank, "no ascent", rho=None)
    _like_one_process(rank, "interval", mask_interval=2, base_step_probability=0.3)
    _like_one_process(rank, "frozen", prepare=_freeze)
    _like_one_process(rank, "kept after forward", fsdp=kept, rule=C_SAM)
    _like_one_process(
        rank,
        "kept after backward",
        fsdp=kept,
        prepare=lambda model: getattr(model, "set_reshard_after_backward", id)(False),
        rule=TOPK_PLUS,
    )


def _accumulation():
    """Two micro-batches a pass; only the second of them is reduced over processes."""
    alone = network()
    sharded = shard(alone)
    one, other = optimizer_for(alone), optimizer_for(sharded)
    for batch in batches(4):
        train(alone, one, [batch])
        x, y = ours(batch)

        def backward(x=x, y=y):
            halves = zip(x.chunk(2), y.chunk(2), strict=True)
            for last, (inputs, labels) in enumerate(halves):
                sharded.set_requires_gradient_sync(bool(last))
                sharded.set_reshard_after_backward(bool(last))
                (cross_entropy(sharded(inputs), labels) / 2).backward()

        other.zero_grad()
        backward()
        with other.compressed():
            backward()
        other.step()
    assert_close(sharded, alone, "accumulation")


class InterruptedPassError(Exception):
    pass


def _weights_come_back():
    """With lr = 0, and when the closure raises at w~, at each of its stages."""
    data = [ours(batch) for batch in batches(2)]
    for reshard_after_forward in (True, False):
        sharded = shard(network(), reshard_after_forward=reshard_after_forward)
        before = local_state(sharded)
        optimizer = optimizer_for(sharded, lr=0.0, rho=1.0)
        train(sharded, optimizer, data)
        x, y = data[0]
        output = sharded(x).detach()
        for stage in ("inside forward", "after forward", "after backward"):
            passes = []

            def closure(stage=stage, passes=passes, sharded=sharded, optimizer=optimizer, x=x, y=y):
                passes.append(stage)
                second = len(passes) == 2
                optimizer.zero_grad()
                fails = second and stage == "inside forward"
                hook = sharded.fc.register_forward_pre_hook(_interrupt) if fails else None
                try:
                    loss = cross_entropy(sharded(x), y)
                finally:
                    if hook is not None:
                        hook.remove()
                if second and stage == "after forward":
                    raise InterruptedPassError
                loss.backward()
                if second:
                    raise InterruptedPassError
                return loss

            with pytest.raises(InterruptedPassError):
                optimizer.step(closure)
            after = local_state(sharded)
            assert all(torch.equal(before[n], after[n]) for n in before), stage
            assert torch.equal(sharded(x).detach(), output), stage
        train(sharded, optimizer, data)


def _interrupt(*_):
    raise InterruptedPassError


def _not_finite(rank):
    """A NaN in the gradients of one rank alone is an error on all, and its parameter is named."""
    found = {1: r"in: .*up\.weight, ", 2: r"no step taken; in: up\.weight$"}
    for rule, base, bad in ((CRAM_PLUS, SGD, 1), (CRAM, AdamW, 1), (CRAM, SGD, 2)):
        sharded = shard(network())
        optimizer = optimizer_for(sharded, rule=rule, base=base)
        data = [ours(batch) for batch in batches(2)]
        train(sharded, optimizer, data[:1])
        before, passes = local_state(sharded), []

        def closure(
            x=data[1][0], y=data[1][1], sharded=sharded, optimizer=optimizer, passes=passes, bad=bad
        ):
            passes.append(1)
            optimizer.zero_grad()
            loss = cross_entropy(sharded(x), y)
            loss.backward()
            if rank == 1 and len(passes) == bad:
                sharded.up.weight.grad.to_local()[0, 0] = torch.inf
            return loss

        with pytest.raises(FloatingPointError, match=found[bad]):
            optimizer.step(closure)
        after = local_state(sharded)
        assert all(torch.equal(before[n], after[n]) for n in before)
        train(sharded, optimizer, data[1:])
        assert any((before[n] != v).any() for n, v in local_state(sharded).items() if v.numel())


def _scaled(rank):
    """The scaler skips a step that overflows on one rank alone; otherwise it changes nothing."""
    plain, scaled = shard(network()), shard(network())
    one, other = optimizer_for(plain, CRAM), optimizer_for(scaled, CRAM, mask_interval=2)
    one._sampler.mask_interval = 2
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number, (x, y) in enumerate([ours(batch) for batch in batches(4)]):
        bad = number == 2
        before = local_state(scaled)
        other.zero_grad()
        scaler.scale(cross_entropy(scaled(x), y)).backward()
        if bad and rank == 1:
            scaled.gate.bias.grad.to_local().fill_(0)  # may be empty
            scaled.up.weight.grad.to_local()[0, 0] = torch.inf
        with other.compressed(grad_scaler=scaler):
            scaler.scale(cross_entropy(scaled(x), y)).backward()
        scaler.step(other)
        scaler.update()
        if bad:
            after = local_state(scaled)
            assert all(torch.equal(before[n], after[n]) for n in before)
            assert not any(operator == other.operator for operator, _ in other._sampler._masks)
            one._sampler.draw(0.0)
            one._sampler.forget(other.operator)
        else:
            train(plain, one, [(x, y)])
    assert scaler.get_scale() == 512.0
    for name, value in whole_state(plain).items():
        torch.testing.assert_close(whole_state(scaled)[name], value, rtol=1e-8, atol=1e-8)


def _mixed_precision(rank):
    """Forward and backward in bfloat16, weights in float32: about what float32 gives."""
    data = [ours(batch) for batch in batches(3, dtype=torch.float32)]
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    found = []
    for options in ({}, {"mp_policy": policy}):
        sharded = shard(network(torch.float32), **options)
        optimizer = optimizer_for(sharded, operators="global:0.5", lr=0.05)
        torch.manual_seed(rank)
        train(sharded, optimizer, data)
        assert all(p.dtype == torch.float32 for p in sharded.parameters())
        found.append(whole_state(sharded))
    assert_same_on_all_ranks(found[1])
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0.05, atol=0.05)
    assert any((found[0][name] != found[1][name]).any() for name in found[0])


def _two(rank):
    _rules(rank)
    _options(rank)
    _accumulation()
    _weights_come_back()
    _not_finite(rank)
    _scaled(rank)
    _mixed_precision(rank)


def test_two_ranks():
    assert run_ranks(2, _two) == 2


def _whole_beside_sharded(rank):
    """Parameters that FSDP ignores are whole, and count once in |g|."""
    data = batches(4)
    alone, model = network(), network()
    outside = {model.norm.weight, model.norm.bias, model.fc.weight}
    fully_shard(model.up)
    sharded = fully_shard(model, ignored_params=outside)
    one = optimizer_for(alone, normalize=True)
    other = optimizer_for(sharded, normalize=True)
    train(alone, one, data)
    torch.manual_seed(rank)
    for x, y in data:  # every rank on all of it: FSDP averages, and the ignored are alike
        train(sharded, other, [(x, y)])
    assert_close(sharded, alone, "ignored")
    assert_same_on_all_ranks({n: whole_of(p.detach()) for n, p in sharded.named_parameters()})


def _four(rank):
    _like_one_process(rank, "four", rule=CRAM_PLUS)
    _like_one_process(rank, "four, normalized", rule=SAM, base=AdamW)
    _like_one_process(rank, "four, no ascent", rho=None, mesh=replicated_shards())
    for rule in (C_SAM, CRAM_PLUS):
        mesh = replicated_shards()
        _like_one_process(rank, f"replicas {rule.name}", mesh=mesh, rule=rule, mask_interval=2)
    _like_one_process(rank, "regrouped after forward", fsdp={"reshard_after_forward": 2})
    _whole_beside_sharded(rank)


@pytest.mark.slow  # two ranks are tested always
def test_four_ranks():
    assert run_ranks(4, _four) == 4
