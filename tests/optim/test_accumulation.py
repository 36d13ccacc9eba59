"""Micro-batches: however a batch is cut, in either pass, the step is the same."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import RULES, mlp, same, snapshot
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW

from torchcram import CRAM_PLUS, CrAM

rules = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
COUNT = 12
BASES = {
    "SGD": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: AdamW(p, lr=0.01, eps=1e-4),
}


@st.composite
def cuts(draw):
    """Sizes of the micro-batches of one pass."""
    inner = draw(st.sets(st.integers(1, COUNT - 1)))
    ends = [0, *sorted(inner), COUNT]
    return [b - a for a, b in pairwise(ends)]


def build(rule, base="SGD", **options):
    torch.manual_seed(0)
    model = mlp().double()
    base = BASES[base](model.parameters())
    operators = ["global:0.5", "nm:2:4", "int4"]
    return model, CrAM(model, base, operators, rule=rule, rho=0.1, **options)


def batch_of():
    return torch.randn(COUNT, 8, dtype=torch.float64), torch.randint(4, (COUNT,))


def backward(model, batch, sizes, scaler=None):
    for x, y in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
        loss = cross_entropy(model(x), y) * (len(x) / COUNT)
        (loss if scaler is None else scaler.scale(loss)).backward()


def step(model, optimizer, batch, passes, *, clip=None):
    """`passes` are the sizes of the micro-batches at w, then at each w~."""
    optimizer.zero_grad()
    backward(model, batch, passes[0])
    for sizes in passes[1:]:
        with optimizer.compressed():
            backward(model, batch, sizes)
    if clip is not None:
        clip_grad_norm_(model.parameters(), clip)
    optimizer.step()


def assert_alike(one, two):
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@rules
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("clip", [None, 0.05], ids=["", "clipped"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_any_cut_in_any_pass_takes_the_same_step(rule, base, clip, data):
    number = 1 + len(rule.passes)
    passes = [data.draw(cuts()) for _ in range(number)]
    one, first = build(rule, base)
    two, second = build(rule, base)
    for _ in range(2):
        batch = batch_of()
        step(one, first, batch, [[COUNT]] * number, clip=clip)
        step(two, second, batch, passes, clip=clip)
    assert_alike(one, two)


@rules
@settings(max_examples=5, deadline=None)
@given(sizes=cuts())
def test_any_cut_under_a_scaler(rule, sizes):
    one, first = build(rule)
    two, second = build(rule)
    batch, scaler = batch_of(), GradScaler("cpu", init_scale=65536.0)
    step(one, first, batch, [[COUNT]] * (1 + len(rule.passes)))
    backward(two, batch, sizes, scaler)
    for _ in rule.passes:
        with second.compressed(grad_scaler=scaler):
            backward(two, batch, sizes, scaler)
    scaler.step(second)
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)  # the scaler counts in float32


@rules
def test_a_closure_may_go_through_micro_batches(rule):
    one, first = build(rule)
    two, second = build(rule)
    for _ in range(3):
        batch = batch_of()
        step(one, first, batch, [[5, 7]] * (1 + len(rule.passes)))

        def closure(batch=batch):
            second.zero_grad()
            backward(two, batch, [5, 7])

        second.step(closure)
    assert same(snapshot(one), snapshot(two))


def test_one_operator_per_step_however_many_micro_batches():
    def drawn(sizes):
        model, optimizer = build(CRAM_PLUS, mask_interval=2)
        seen = []
        for _ in range(20):
            batch = batch_of()
            backward(model, batch, sizes)
            with optimizer.compressed():
                for x, y in zip(batch[0].split(sizes), batch[1].split(sizes), strict=True):
                    seen.append((optimizer.operator, snapshot(model)))
                    cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            here = seen[-len(sizes) :]
            assert len({operator for operator, _ in here}) == 1
            assert all(same(point, here[0][1]) for _, point in here)
        uses = sum(optimizer._sampler._uses.values())
        return [str(operator) for operator, _ in seen[:: len(sizes)]], uses

    assert drawn([12]) == drawn([3, 4, 5])
    assert drawn([1] * 12)[1] == 20
    assert len(set(drawn([12])[0])) == 3


def test_the_gradient_at_w_may_be_gathered_over_several_calls_of_a_loader():
    """The usual loop: a step at every third batch, which are kept until then."""
    one, first = build(CRAM_PLUS)
    two, second = build(CRAM_PLUS)
    whole = batch_of()
    step(one, first, whole, [[COUNT]] * 2)
    kept = []
    for number, batch in enumerate(zip(whole[0].split(4), whole[1].split(4), strict=True), 1):
        (cross_entropy(two(batch[0]), batch[1]) / 3).backward()
        kept.append(batch)
        if number % 3 == 0:
            with second.compressed():
                for x, y in kept:
                    (cross_entropy(two(x), y) / 3).backward()
            second.step()
    assert_alike(one, two)
