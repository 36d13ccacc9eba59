"""The primitive under `step`: loops without a closure, micro-batches, GradScaler."""

import copy

import pytest
import torch
from nets import RULES, ConvNet, closure_for, images, mlp, same, snapshot
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from torchcram import C_SAM, CRAM_PLUS, CrAM, GlobalTopK

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)


def batch_of(count):
    return torch.randn(count, 8), torch.randint(4, (count,))


def build(rule, seed=0, **options):
    torch.manual_seed(seed)
    model = mlp()
    base = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, CrAM(
        model, base, [GlobalTopK(0.5), GlobalTopK(0.8)], rule=rule, rho=0.1, **options
    )


@rules
def test_the_context_is_what_the_closure_does(rule):
    one, first = build(rule)
    two, second = build(rule)
    for _ in range(5):
        batch = batch_of(6)
        first.step(closure_for(one, first, batch))
        closure_for(two, second, batch)()
        for _ in rule.passes:
            with second.compressed() as needed:
                assert needed
                cross_entropy(two(batch[0]), batch[1]).backward()
        second.step()
    assert same(snapshot(one), snapshot(two))


@rules
def test_micro_batches_add_up_to_the_batch(rule):
    one, first = build(rule)
    two, second = build(rule)
    for _ in range(3):
        batch = batch_of(12)
        first.step(closure_for(one, first, batch))
        second.zero_grad()

        def accumulate(batch=batch):
            for part in range(0, 12, 4):
                x, y = batch[0][part : part + 4], batch[1][part : part + 4]
                (cross_entropy(two(x), y) / 3).backward()

        accumulate()
        for _ in rule.passes:
            with second.compressed():
                accumulate()
        second.step()
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def scaled_step(model, optimizer, scaler, batch, *, spoil=None):
    """One step under a scaler; `spoil` names the pass whose gradient overflows."""
    optimizer.zero_grad()

    def backward(number):
        loss = cross_entropy(model(batch[0]), batch[1])
        scaler.scale(loss * (torch.inf if spoil == number else 1)).backward()

    backward(0)
    for number in range(len(optimizer.rule.passes)):
        with optimizer.compressed(grad_scaler=scaler):
            backward(number + 1)
    scaler.step(optimizer)
    scaler.update()


@rules
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**16])
def test_the_loss_scale_does_not_change_the_step(rule, scale):
    one, first = build(rule)
    two, second = build(rule)
    scaler = GradScaler("cpu", init_scale=scale)
    for _ in range(3):
        batch = batch_of(6)
        first.step(closure_for(one, first, batch))
        scaled_step(two, second, scaler, batch)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@rules
@pytest.mark.parametrize("spoil", [0, 1])
def test_an_overflow_in_any_pass_skips_the_step_and_lowers_the_scale(rule, spoil):
    model, optimizer = build(rule, mask_interval=2)
    scaler = GradScaler("cpu", init_scale=64.0)
    scaled_step(model, optimizer, scaler, batch_of(6))
    before = snapshot(model)
    scaled_step(model, optimizer, scaler, batch_of(6), spoil=spoil)
    assert same(snapshot(model), before)
    assert scaler.get_scale() == 32.0
    scaled_step(model, optimizer, scaler, batch_of(6))
    assert not same(snapshot(model), before)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_masks_of_an_overflow_are_not_kept():
    model, optimizer = build(CRAM_PLUS, mask_interval=100)
    scaler = GradScaler("cpu", init_scale=64.0)
    for spoil in (0, None, 0, None, 0):
        scaled_step(model, optimizer, scaler, batch_of(6), spoil=spoil)
        kept = {operator for operator, _ in optimizer._sampler._masks}
        assert (optimizer.operator in kept) == (spoil is None)


def test_a_disabled_scaler_is_no_scaler():
    one, first = build(CRAM_PLUS)
    two, second = build(CRAM_PLUS)
    batch = batch_of(6)
    first.step(closure_for(one, first, batch))
    scaled_step(two, second, GradScaler("cpu", enabled=False), batch)
    assert same(snapshot(one), snapshot(two))


def test_clipping_between_context_and_step():
    model, optimizer = build(CRAM_PLUS)
    batch = batch_of(6)
    closure_for(model, optimizer, batch)()
    with optimizer.compressed():
        cross_entropy(model(batch[0]), batch[1]).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    before = snapshot(model)
    optimizer.step()
    moved = torch.cat(
        [
            (a - b.detach()).flatten()
            for a, b in zip(before.values(), model.parameters(), strict=True)
        ]
    )
    assert moved.norm().item() == pytest.approx(1e-4, rel=1e-3)


def test_a_step_without_context_is_one_of_the_base_where_that_is_allowed():
    model = ConvNet()
    plain = copy.deepcopy(model)
    base = AdamW(model.parameters(), lr=0.1)
    optimizer = CrAM(model, base, GlobalTopK(0.9), allow_plain_steps=True)
    base, batch = AdamW(plain.parameters(), lr=0.1), images()
    closure_for(model, optimizer, batch)()
    optimizer.step()
    closure_for(plain, base, batch)()
    base.step()
    assert same(snapshot(model), snapshot(plain))


def test_a_pass_that_is_missing_is_an_error():
    model, optimizer = build(C_SAM)
    batch = batch_of(6)
    closure_for(model, optimizer, batch)()
    with optimizer.compressed():
        cross_entropy(model(batch[0]), batch[1]).backward()
    before = snapshot(model)
    with pytest.raises(RuntimeError, match=r"C-SAM needs compressed\(\) 2 times.*got 1"):
        optimizer.step()
    assert same(snapshot(model), before)
