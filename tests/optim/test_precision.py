"""Mixed precision: autocast in bfloat16, float16 under a GradScaler."""

import copy

import pytest
import torch
from nets import RULES, mlp, same, snapshot
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from torchcram import CRAM_PLUS, CrAM, GlobalTopK, Quantize, compress

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
BASES = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "AdamW": lambda p: AdamW(p, lr=0.01),
    "fused": lambda p: AdamW(p, lr=0.01, fused=True),
}
bases = pytest.mark.parametrize("base", BASES)


def batch_of(count=6):
    return torch.randn(count, 8), torch.randint(4, (count,))


def build(rule, base="SGD", operators=("global:0.5", "nm:2:4", "int4"), **options):
    torch.manual_seed(0)
    model = mlp()
    return model, CrAM(model, BASES[base](model.parameters()), operators, rule=rule, **options)


class Loop:
    """A training loop as users write it, with a scaler or without."""

    def __init__(self, model, optimizer, scaler=None, *, autocast=None, clip=None, half=False):
        self.model, self.optimizer = model, optimizer
        self.scaler = scaler or GradScaler("cpu", enabled=False)
        self.autocast, self.clip = autocast, clip
        self.half = half  # gradients pass through float16, whose kernels not every CPU has

    def backward(self, batch, *, spoil=False):
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            out = self.model(batch[0])
            loss = cross_entropy(out.half().float() if self.half else out, batch[1])
        self.scaler.scale(loss * (torch.inf if spoil else 1)).backward()
        return loss

    def step(self, batch, *, spoil=None):
        """`spoil` is the pass that overflows: 0 at w, 1 and for C-SAM 2 at w~."""
        self.optimizer.zero_grad()
        loss = self.backward(batch, spoil=spoil == 0)
        for number, _ in enumerate(self.optimizer.rule.passes, 1):
            with self.optimizer.compressed(grad_scaler=self.scaler):
                self.backward(batch, spoil=spoil == number)
        if self.clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), self.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.item()


def optimizer_state(optimizer):
    return {
        (number, key): value.clone()
        for number, entries in optimizer.base.state_dict()["state"].items()
        for key, value in entries.items()
        if torch.is_tensor(value)
    }


@rules
@bases
@pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clipped"])
def test_loss_scales_1_and_65536_give_the_same_bits(rule, base, clip):
    batches, ends = [batch_of() for _ in range(4)], []
    for scaler in (None, GradScaler("cpu", init_scale=1.0), GradScaler("cpu", init_scale=65536.0)):
        model, optimizer = build(rule, base)
        loop = Loop(model, optimizer, scaler, clip=clip)
        for batch in batches:
            loop.step(batch)
        ends.append(snapshot(model))
    assert same(ends[1], ends[2])
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=1e-5, atol=1e-7)


@rules
def test_a_scale_that_grows_does_not_change_the_training(rule):
    scaler = GradScaler("cpu", init_scale=2.0, growth_interval=2)
    one, two = build(rule), build(rule)
    fixed, growing = Loop(*one, GradScaler("cpu", init_scale=2.0)), Loop(*two, scaler)
    for _ in range(7):
        batch = batch_of()
        fixed.step(batch)
        growing.step(batch)
    assert scaler.get_scale() == 16.0
    assert same(snapshot(one[0]), snapshot(two[0]))


@rules
@bases
@pytest.mark.parametrize("clip", [None, 0.1], ids=["", "clipped"])
def test_an_overflow_in_any_pass_leaves_weights_and_moments_alone(rule, base, clip):
    for spoil in range(1 + len(rule.passes)):
        model, optimizer = build(rule, base, mask_interval=3)
        scaler = GradScaler("cpu", init_scale=64.0)
        loop = Loop(model, optimizer, scaler, clip=clip)
        loop.step(batch_of())
        before, moments = snapshot(model), optimizer_state(optimizer)
        loop.step(batch_of(), spoil=spoil)
        assert same(snapshot(model), before)
        assert same(optimizer_state(optimizer), moments)
        assert scaler.get_scale() == 32.0
        loop.step(batch_of())
        assert not same(snapshot(model), before)
        assert all(torch.isfinite(p).all() for p in model.parameters())


@rules
def test_draws_and_masks_go_on_after_a_step_that_was_skipped(rule):
    batches, skipped = [batch_of() for _ in range(6)], batch_of()
    for spoil in range(1 + len(rule.passes)):
        model, optimizer = build(rule, operators="global:0.5", mask_interval=2)
        twin, other = build(rule, operators="global:0.5", mask_interval=2)
        for end in (optimizer, other):
            end.param_groups[0]["lr"] = 0.0
        ours = Loop(model, optimizer, GradScaler("cpu", init_scale=64.0))
        theirs = Loop(twin, other, GradScaler("cpu", init_scale=64.0))
        ours.step(skipped, spoil=spoil)
        theirs.step(skipped)
        assert optimizer._sampler._uses == other._sampler._uses  # a use that is skipped is one, too
        for batch in batches:
            ours.step(batch)
            theirs.step(batch)
            kept = optimizer._sampler._masks.values()
            assert all(int(m.sum()) > 0 for masks in kept for m in masks.values())
        ours_now, theirs_now = (o._sampler._masks for o in (optimizer, other))
        assert ours_now.keys() == theirs_now.keys()
        for key, masks in ours_now.items():
            assert all(torch.equal(masks[name], theirs_now[key][name]) for name in masks)


@rules
def test_float16_finds_its_scale_and_trains(rule):
    model, optimizer = build(rule, operators="global:0.5", rho=0.02)
    scaler = GradScaler("cpu", init_scale=2.0**40)
    loop, batch = Loop(model, optimizer, scaler, half=True), batch_of(32)
    before = snapshot(model)
    for _ in range(15):
        loop.step(batch)
    assert scaler.get_scale() == 2.0**25  # float16 ends at 65504
    assert same(snapshot(model), before)
    losses = [loop.step(batch) for _ in range(40)]
    assert losses[-1] < losses[0] - 0.2
    assert all(torch.isfinite(p).all() for p in model.parameters())


@rules
def test_autocast_takes_about_the_step_of_float32(rule):
    one, two = build(rule, operators="uniform:0.5"), build(rule, operators="uniform:0.5")
    before, batch = snapshot(one[0]), batch_of()
    Loop(*one).step(batch)
    Loop(*two, autocast=torch.bfloat16).step(batch)
    moved = torch.cat([(snapshot(one[0])[n] - before[n]).flatten() for n in before])
    off = torch.cat([(snapshot(two[0])[n] - snapshot(one[0])[n]).flatten() for n in before])
    assert moved.norm() > 0.01
    assert off.norm() < 0.1 * moved.norm()
    assert all(p.dtype == torch.float32 for p in two[0].parameters())


@pytest.mark.parametrize("operator", [GlobalTopK(0.5), Quantize(4)], ids=str)
def test_the_compressed_point_is_computed_in_float32(operator):
    model, optimizer = build(CRAM_PLUS, operators=operator, rho=0.1)
    loop, batch = Loop(model, optimizer, autocast=torch.bfloat16), batch_of()
    loop.backward(batch)
    ascended = copy.deepcopy(model)
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), ascended.parameters(), strict=True):
            theirs.add_(ours.grad, alpha=0.1)
    expected = compress(ascended, operator)
    with optimizer.compressed():
        assert same(snapshot(model), snapshot(expected))
        loop.backward(batch)


def test_weights_in_bfloat16_come_back_bit_for_bit():
    model = mlp().bfloat16()
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.0), ["global:0.5", "int4"], rho=0.3)
    before, batch = snapshot(model), batch_of()
    for _ in range(4):
        optimizer.zero_grad()
        cross_entropy(model(batch[0].bfloat16()), batch[1]).backward()
        with optimizer.compressed():
            assert not same(snapshot(model), before)
            cross_entropy(model(batch[0].bfloat16()), batch[1]).backward()
        optimizer.step()
    assert same(snapshot(model), before)


@rules
def test_clipping_of_unscaled_gradients_is_that_without_a_scaler(rule):
    model, optimizer = build(rule)
    scaler, batch = GradScaler("cpu", init_scale=1024.0), batch_of()
    loop = Loop(model, optimizer, scaler)
    loop.backward(batch)
    for _ in rule.passes:
        with optimizer.compressed(grad_scaler=scaler):
            loop.backward(batch)
    scaler.unscale_(optimizer)
    norm = clip_grad_norm_(model.parameters(), 1e-3)
    assert 1e-2 < norm < 10  # of g~ itself, without the scale
    before = snapshot(model)
    scaler.step(optimizer)
    moved = [(before[n] * (1 - 1e-3) - p).flatten() for n, p in model.named_parameters()]
    assert torch.cat(moved).norm().item() == pytest.approx(1e-4, rel=1e-2)


def test_unscaling_before_the_compressed_pass_is_refused():
    model, optimizer = build(CRAM_PLUS)
    scaler, batch = GradScaler("cpu", init_scale=1024.0), batch_of()
    loop = Loop(model, optimizer, scaler)
    before = snapshot(model)
    loop.backward(batch)
    scaler.unscale_(optimizer)
    with (
        pytest.raises(RuntimeError, match="before compressed"),
        optimizer.compressed(grad_scaler=scaler),
    ):
        raise AssertionError
    assert same(snapshot(model), before)
