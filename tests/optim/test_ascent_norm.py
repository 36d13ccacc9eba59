"""The ascent along a gradient of bounded length; what the base optimizer gets is not bounded."""

import copy

import pytest
import torch
from nets import ConvNet, closure_for, images
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from torchcram import C_SAM, CRAM, CRAM_PLUS, SAM, TOPK, CrAM, GlobalTopK

RHO, LR = 0.3, 0.5


def build(model, bound, rule=CRAM_PLUS, **options):
    base = SGD(model.parameters(), lr=LR)
    return CrAM(model, base, GlobalTopK(0.5), rho=RHO, rule=rule, max_ascent_norm=bound, **options)


def gradient(model, batch):
    model.zero_grad()
    cross_entropy(model(batch[0]), batch[1]).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def oracle(model, batch, bound, *, plus):
    """g~ written with torch's own clipping."""
    model = copy.deepcopy(model)
    g = gradient(model, batch)
    clip_grad_norm_(model.parameters(), bound)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter += RHO * parameter.grad
    layers = [n for n, p in model.named_parameters() if p.dim() > 1]
    flat = torch.cat([model.get_parameter(n).detach().reshape(-1) for n in layers])
    least = flat.abs().sort(descending=True).values[flat.numel() - round(flat.numel() / 2) - 1]
    masks = {n: model.get_parameter(n).detach().abs() >= least for n in layers}
    with torch.no_grad():
        for name, mask in masks.items():
            model.get_parameter(name).mul_(mask)
    found = gradient(model, batch)
    found = {n: value * masks[n] if n in masks else value for n, value in found.items()}
    return {n: found[n] + g[n] for n in g} if plus else found


@pytest.mark.parametrize("rule", [CRAM, CRAM_PLUS], ids=lambda rule: rule.name)
@pytest.mark.parametrize("bound", [0.01, 0.5, 1e6])
def test_the_gradient_is_that_of_the_oracle(rule, bound):
    model, batch = ConvNet().double(), images(dtype=torch.float64)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    expected = oracle(model, batch, bound, plus=rule is CRAM_PLUS)
    optimizer = build(model, bound, rule)
    optimizer.step(closure_for(model, optimizer, batch))
    for name, value in expected.items():
        moved = (before[name] - model.get_parameter(name).detach()) / LR
        torch.testing.assert_close(moved, value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("bound", [0.01, 1e6])
def test_the_loss_scale_does_not_count(bound):
    def trained(scale):
        torch.manual_seed(0)
        model, batch = ConvNet().double(), images(dtype=torch.float64)
        optimizer = build(model, bound)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()
        with optimizer.compressed(grad_scaler=scaler):
            scaler.scale(cross_entropy(model(batch[0]), batch[1])).backward()
        scaler.step(optimizer)
        return [p.detach() for p in model.parameters()]

    for one, other in zip(trained(1.0), trained(65536.0), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_wide_bound_changes_nothing_but_rounding():
    def trained(bound):
        torch.manual_seed(0)
        model = ConvNet().double()
        optimizer = build(model, bound)
        optimizer.step(closure_for(model, optimizer, images(dtype=torch.float64)))
        return [p.detach() for p in model.parameters()]

    for one, other in zip(trained(None), trained(1e9), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("bound", "options", "says"),
    [
        (0.0, {}, "max_ascent_norm=0.0 is neither None nor positive"),
        (-1, {}, "max_ascent_norm=-1 is neither"),
        (float("nan"), {}, "max_ascent_norm=nan is neither"),
        ("1", {}, "max_ascent_norm='1' is neither"),
        (1.0, {"rule": SAM}, r"has no effect: SAM ascends along g/\|g\|"),
        (1.0, {"rule": C_SAM}, "has no effect: C-SAM"),
        (1.0, {"normalize": True}, "has no effect: CrAM"),
        (1.0, {"rule": TOPK}, "has no effect: Top-K does not ascend"),
    ],
)
def test_bad_input_is_refused(bound, options, says):
    with pytest.raises(ValueError, match=says):
        build(ConvNet(), bound, **options)
    build(ConvNet(), 1.0, rule=SAM, normalize=False)
