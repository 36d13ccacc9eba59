"""Sums made by one kernel, interpreted without a GPU, are those of the operations of torch."""

from types import SimpleNamespace

import pytest
import torch
from nets import ConvNet
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD

pytest.importorskip("triton")

from torchcram import CRAM, CRAM_PLUS, SAM, CrAM, UpdateRule
from torchcram.kernels import cuda
from torchcram.optim import gradients
from torchcram.optim.rules import Pass

UNMASKED = UpdateRule("unmasked", (Pass(ascend=True, compress=True, plus=True),))


@pytest.fixture
def calls(monkeypatch):
    """Lets gradients on the CPU take the kernel, and returns how many each call combined."""
    counts = []

    def combine_(tensors, others, masks, bad):
        counts.append((len(tensors), sum(mask is not None for mask in masks)))
        cuda.combine_(tensors, others, masks, bad)

    def can_combine(tensors, others, _):
        return all(t.stride() == other.stride() for t, other in zip(tensors, others, strict=True))

    def add_scaled_(tensors, others, scale):
        counts.append(len(tensors))
        cuda.add_scaled_(tensors, others, scale)

    kernels = SimpleNamespace(
        can_combine=can_combine,
        combine_=combine_,
        can_add_scaled=can_combine,
        add_scaled_=add_scaled_,
    )
    monkeypatch.setattr(gradients, "cuda_kernels", lambda: kernels)
    return counts


def steps(rule=CRAM_PLUS, *, change=None, **options):
    """Returns the weights after a few steps; `change` edits the model after every backward."""
    torch.manual_seed(0)
    model = ConvNet()
    optimizer = CrAM(
        model,
        SGD(model.parameters(), lr=0.1),
        ["global:0.5", "nm:2:4"] if rule.compresses else (),
        rule=rule,
        **options,
    )
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 4, 6, 6, generator=generator)
        y = torch.randint(5, (8,), generator=generator)

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            if change is not None:
                change(model)
            return loss

        optimizer.step(closure)
    return model.state_dict()


def assert_equal(ours, theirs):
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize("rule", [CRAM_PLUS, UNMASKED], ids=lambda rule: rule.name)
def test_the_steps_are_the_same(rule, calls):
    ours = steps(rule)
    assert len(calls) == 3
    assert {masks for _, masks in calls} == ({3} if rule is CRAM_PLUS else {0})
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(gradients, "cuda_kernels", lambda: None)
        assert_equal(ours, steps(rule))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.fc.bias, "grad", None) if is_compressed(model) else None,
        lambda model: None if is_compressed(model) else setattr(model.fc.bias, "grad", None),
    ],
    ids=["no second gradient", "no first gradient"],
)
def test_parameters_without_one_of_the_gradients_are_left_to_torch(change, calls):
    ours = steps(change=change)
    assert not calls
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(gradients, "cuda_kernels", lambda: None)
        assert_equal(ours, steps(change=change))


def test_an_ascent_by_a_factor_on_the_device(calls):
    ours = steps(SAM)
    assert len(calls) == 3
    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(gradients, "cuda_kernels", lambda: None)
        assert_equal(ours, steps(SAM))


def is_compressed(model):
    return not model.bn1.track_running_stats


def test_a_rule_that_adds_nothing_takes_no_kernel(calls):
    steps(CRAM)
    assert not calls


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_not_finite_stops_the_step(value, calls):
    def spoil(model):
        if is_compressed(model):
            model.fc.bias.grad[0] = value

    with pytest.raises(FloatingPointError, match=r"no step taken; in: fc\.bias"):
        steps(change=spoil)
    assert len(calls) == 1
    steps(change=spoil, check_finite=False)


def test_gradients_written_over_one_another_are_refused(calls):
    model = nn.Linear(4, 3)
    optimizer = CrAM(model, SGD(model.parameters(), lr=0.1), "global:0.5")
    model(torch.ones(2, 4)).sum().backward()
    kept = [p.grad for p in model.parameters()]

    def write_over():
        with optimizer.compressed():
            for parameter, gradient in zip(model.parameters(), kept, strict=True):
                parameter.grad = gradient

    with pytest.raises(RuntimeError, match="written over the first"):
        write_over()
    assert not calls
