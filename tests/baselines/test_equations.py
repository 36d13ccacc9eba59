"""Every method against an oracle of ten lines, written from the equation of its docstring."""

import math

import pytest
import torch
from problems import adamw, batches, build, loss_on, sgd, top_k, train, weights_of
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from torchcram.baselines import (
    ACDC,
    DPF,
    L0,
    PLATON,
    SFW,
    SRSTE,
    STR,
    CompressionAwareSFW,
    GradualMagnitude,
    GradualObs,
    LotteryTickets,
    Movement,
    SoftMovement,
    SparsitySchedule,
)
from torchcram.operators import NM

SCHEDULE = SparsitySchedule(begin=2, end=8, interval=2, initial=0.2)


def cubic(step):
    if step < 2:
        return 0.0
    return 0.75 if step >= 8 else 0.75 + (0.2 - 0.75) * (1 - (step - 2) / 6) ** 3


def magnitudes(weights):
    return {name: weight.detach().abs() for name, weight in weights.items()}


def masked(weights, masks):
    with torch.no_grad():
        for name, weight in weights.items():
            weight.mul_(masks[name])


def gradual_magnitude(model, base, data):
    weights, masks = weights_of(model), None
    for step, batch in enumerate(data):
        if step in (2, 4, 6, 8):
            masks = top_k(magnitudes(weights), cubic(step))
            masked(weights, masks)
        base.zero_grad()
        loss_on(model, batch).backward()
        for name, weight in weights.items() if masks else ():
            weight.grad *= masks[name]
        base.step()
        if masks:
            masked(weights, masks)


def dpf(model, base, data):
    weights, masks = weights_of(model), None
    for step, batch in enumerate(data):
        if step in (2, 4, 6, 8, 10):
            masks = top_k(magnitudes(weights), cubic(step))
        dense = {name: weight.detach().clone() for name, weight in weights.items()}
        if masks:
            masked(weights, masks)
        base.zero_grad()
        loss_on(model, batch).backward()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(dense[name])
        base.step()


def acdc(model, base, data):
    weights, masks = weights_of(model), None
    for step, batch in enumerate(data):
        phase = "dddccddccccc"[step]
        if step and phase != "dddccddccccc"[step - 1]:
            masks = top_k(magnitudes(weights), 0.75) if phase == "c" else None
            if masks:
                masked(weights, masks)
            else:
                base.state.clear()
        base.zero_grad()
        loss_on(model, batch).backward()
        for name, weight in weights.items() if masks else ():
            weight.grad *= masks[name]
        base.step()
        if masks:
            masked(weights, masks)


def sr_ste(model, base, data):
    weights = weights_of(model)
    for batch in data:
        dense = {name: weight.detach().clone() for name, weight in weights.items()}
        masks = NM(2, 4).select(dense)
        masked(weights, masks)
        base.zero_grad()
        loss_on(model, batch).backward()
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(dense[name])
                weight.grad += 0.1 * ~masks[name] * weight
        base.step()


def soft_threshold(model, base, data):
    weights = weights_of(model)
    s = {name: torch.full((), -3.0, requires_grad=True) for name in weights}
    base.add_param_group({"params": list(s.values())})
    for inputs, labels in data:
        moved = {n: w.sign() * (w.abs() - s[n].sigmoid()).relu() for n, w in weights.items()}
        base.zero_grad()
        cross_entropy(functional_call(model, moved, (inputs,)), labels).backward()
        base.step()


def l0(model, base, data):
    weights, generator = weights_of(model), torch.Generator().manual_seed(7)
    start = {
        n: torch.empty_like(w).normal_(0, 0.01, generator=generator) for n, w in weights.items()
    }
    log_a = {n: (noise + 1.5).detach().requires_grad_() for n, noise in start.items()}
    base.add_param_group({"params": list(log_a.values()), "weight_decay": 0})
    for inputs, labels in data:
        u = {n: torch.empty_like(w).uniform_(generator=generator) for n, w in weights.items()}
        y = {n: ((u[n].log() - (1 - u[n]).log() + log_a[n]) * 1.5).sigmoid() for n in weights}
        moved = {n: w * (1.2 * y[n] - 0.1).clamp(0, 1) for n, w in weights.items()}
        opened = [(a - 2 / 3 * math.log(0.1 / 1.1)).sigmoid().flatten() for a in log_a.values()]
        base.zero_grad()
        loss = cross_entropy(functional_call(model, moved, (inputs,)), labels)
        (loss + 30 * torch.cat(opened).mean()).backward()
        base.step()


def gradient_at_mask(model, weights, masks, base, batch):
    """Leaves the gradient at M * w in `.grad`, and w in the model."""
    dense = {name: weight.detach().clone() for name, weight in weights.items()}
    masked(weights, masks)
    base.zero_grad()
    loss_on(model, batch).backward()
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(dense[name])


def movement(model, base, data):
    weights = weights_of(model)
    scores = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    masks = {name: torch.ones_like(weight) for name, weight in weights.items()}
    base.add_param_group({"params": list(scores.values()), "lr": 0.05, "weight_decay": 0})
    for step, batch in enumerate(data):
        if step in (2, 4, 6, 8, 10):
            masks = top_k(scores, cubic(step))
        gradient_at_mask(model, weights, masks, base, batch)
        for name, weight in weights.items():
            scores[name].grad = weight.grad * weight.detach()
            weight.grad *= masks[name]
        base.step()


def soft_movement(model, base, data):
    weights = weights_of(model)
    scores = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    base.add_param_group({"params": list(scores.values()), "lr": 0.05, "weight_decay": 0})
    for step, batch in enumerate(data):
        growth = 0 if step < 2 else 1 - 0.8 * (1 - min((step - 2) / 6, 1)) ** 3
        masks = {name: score.sigmoid() > 0.499 * growth for name, score in scores.items()}
        gradient_at_mask(model, weights, masks, base, batch)
        for name, weight in weights.items():
            p = scores[name].sigmoid()
            scores[name].grad = weight.grad * weight.detach() + 4 * growth * p * (1 - p) / 192
            weight.grad *= masks[name]
        base.step()
    assert 0 < sum(mask.sum() for mask in masks.values()) < 192


def platon(model, base, data):
    weights, masks = weights_of(model), None
    averages = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    uncertainties = {name: torch.zeros_like(weight) for name, weight in weights.items()}
    for step, batch in enumerate(data):
        if step in (2, 4, 6, 8, 10):
            masks = top_k({n: averages[n] * uncertainties[n] for n in weights}, cubic(step))
        base.zero_grad()
        loss_on(model, batch).backward()
        for name, weight in weights.items():
            sensitivity = (weight.detach() * weight.grad).abs()
            averages[name] = 0.8 * averages[name] + 0.2 * sensitivity
            deviation = (sensitivity - averages[name]).abs()
            uncertainties[name] = 0.9 * uncertainties[name] + 0.1 * deviation
        base.step()
        if masks:
            masked(weights, masks)


def frank_wolfe(model, base, data, *, averages, vertex, fraction, tau, rate):
    weights = weights_of(model)
    radii = {name: tau * weight.detach().norm() for name, weight in weights.items()}
    momenta = {}
    base.param_groups[0]["params"] = [p for p in model.parameters() if p.dim() == 1]
    for step, batch in enumerate(data):
        model.zero_grad()
        loss_on(model, batch).backward()
        base.step()
        for name, weight in weights.items():
            g = weight.grad
            m = 0.8 * momenta[name] + (0.2 if averages else 1) * g if step else g
            momenta[name] = m
            count = int(fraction * m.numel())
            v = torch.zeros_like(m).flatten()
            chosen = m.flatten().abs().topk(count).indices
            v[chosen] = -radii[name] * vertex(m.flatten()[chosen])
            away = v.view_as(m) - weight.detach()
            eta = min(rate * base.defaults["lr"] * m.norm() / away.norm(), 1)
            with torch.no_grad():
                weight += eta * away


def sfw(model, base, data):
    def vertex(largest):
        return largest.sign() / len(largest) ** 0.5

    options = {"averages": True, "fraction": 0.1, "tau": 5, "rate": 10}
    frank_wolfe(model, base, data, vertex=vertex, **options)


def compression_aware_sfw(model, base, data):
    def vertex(largest):
        return largest / largest.norm()

    options = {"averages": False, "fraction": 0.3, "tau": 0.5, "rate": 60}  # clipped at times
    frank_wolfe(model, base, data, vertex=vertex, **options)


def lottery_tickets(model, base, data):
    weights, masks = weights_of(model), None
    data, early = iter(data), {}
    for number, sparsity in enumerate((0, 0.5, 0.75)):
        if number:
            masks = top_k(magnitudes(weights), sparsity)
            model.load_state_dict(early)
            masked(weights, masks)
            base.state.clear()
        for step in range(3 if number else 0, 6):
            if step == 3 and not number:
                early = {name: value.clone() for name, value in model.state_dict().items()}
            base.zero_grad()
            loss_on(model, next(data)).backward()
            for name, weight in weights.items() if masks else ():
                weight.grad *= masks[name]
            base.step()
            if masks:
                masked(weights, masks)
    assert next(data, None) is None


def without(w, inverse, mask):
    """Drops weights of one block; the others are corrected by the equation of the surgeon."""
    q = ~mask
    corrected = w - inverse[:, q] @ torch.linalg.solve(inverse[q][:, q], w[q])
    return corrected * mask


def gradual_obs(model, base, data):
    weights, masks, seen = weights_of(model), None, []
    for step, batch in enumerate(data):
        if step in (2, 5, 8):
            blocks, scores = {}, {}
            for name, weight in weights.items():
                g = torch.stack([each[name] for each in seen[-2:]]).double().view(2, -1, 16)
                fisher = torch.einsum("mni,mnj->nij", g, g) / 2 + 1e-2 * torch.eye(16)
                blocks[name] = torch.linalg.inv(fisher)
                costs = weight.detach().double().view(-1, 16) ** 2
                costs = costs / (2 * blocks[name].diagonal(dim1=1, dim2=2))
                scores[name] = costs.view_as(weight)
            masks = top_k(scores, cubic(step))
            for name, weight in weights.items():
                pairs = zip(weight.detach().double().view(-1, 16), blocks[name], strict=True)
                rows = masks[name].view(-1, 16)
                new = [without(w, f, mask) for (w, f), mask in zip(pairs, rows, strict=True)]
                weight.data.copy_(torch.stack(new).view_as(weight))
        base.zero_grad()
        loss_on(model, batch).backward()
        for name, weight in weights.items() if masks else ():
            weight.grad *= masks[name]
        seen.append({name: weight.grad.clone() for name, weight in weights.items()})
        base.step()
        if masks:
            masked(weights, masks)


CASES = {
    "gradual magnitude": (
        gradual_magnitude,
        lambda model, base: GradualMagnitude(model, base, "global:0.75", schedule=SCHEDULE),
    ),
    "DPF": (dpf, lambda model, base: DPF(model, base, "global:0.75", schedule=SCHEDULE)),
    "AC/DC": (
        acdc,
        lambda model, base: ACDC(model, base, "global:0.75", warmup=3, period=2, end=9),
    ),
    "STR": (soft_threshold, lambda model, base: STR(model, base, "global:0.75", initial=-3.0)),
    "l0": (
        l0,
        lambda model, base: L0(
            model, base, "global:0.75", penalty=30, drop_rate=1 / (1 + math.exp(1.5)), seed=7
        ),
    ),
    "movement": (
        movement,
        lambda model, base: Movement(model, base, "global:0.75", schedule=SCHEDULE, score_lr=0.05),
    ),
    "soft movement": (
        soft_movement,
        lambda model, base: SoftMovement(
            model,
            base,
            "global:0.75",
            schedule=SCHEDULE,
            penalty=4,
            threshold=0.499,
            score_lr=0.05,
        ),
    ),
    "PLATON": (
        platon,
        lambda model, base: PLATON(
            model, base, "global:0.75", schedule=SCHEDULE, beta1=0.8, beta2=0.9
        ),
    ),
    "SR-STE": (sr_ste, lambda model, base: SRSTE(model, base, "nm:2:4", decay=0.1)),
    "gradual OBS": (
        gradual_obs,
        lambda model, base: GradualObs(
            model,
            base,
            "global:0.75",
            schedule=SparsitySchedule(begin=2, end=8, interval=3, initial=0.2),
            gradients=2,
            block=16,
            damping=1e-2,
        ),
    ),
    "SFW": (
        sfw,
        lambda model, base: SFW(
            model, base, "global:0.75", fraction=0.1, radius=5, momentum=0.8, lr_scale=10
        ),
    ),
    "compression-aware SFW": (
        compression_aware_sfw,
        lambda model, base: CompressionAwareSFW(
            model, base, "global:0.75", fraction=0.3, radius=0.5, momentum=0.8, lr_scale=60
        ),
    ),
    "lottery tickets": (
        lottery_tickets,
        lambda model, base: LotteryTickets(
            model, base, "global:0.75", round_steps=6, rewind_step=3, rounds=3
        ),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("base_of", [sgd, adamw])
def test_agrees_with_the_oracle(name, base_of):
    oracle, wrap = CASES[name]
    expected, model = build(), build()
    oracle(expected, base_of(expected), batches())
    train(model, wrap(model, base_of(model)), batches())
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
