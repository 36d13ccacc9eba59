"""A loop with Accelerate takes the steps that a bare one takes."""

from contextlib import nullcontext

import pytest
import torch
from nets import mlp, same, snapshot
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset

from torchcram import C_SAM, CRAM_PLUS, CrAM

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
OPERATORS = ("global:0.5", "nm:2:4")
CLIP = 0.05


def made(rule=CRAM_PLUS):
    torch.manual_seed(0)
    model = mlp()
    base = AdamW(model.parameters(), lr=0.01)
    return model, CrAM(model, base, OPERATORS, rule=rule, rho=0.1, mask_interval=2)


def data():
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(30, 8, generator=generator)
    labels = torch.randint(4, (30,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), 6)  # five batches


def train(accelerator, model, optimizer, loader, cram):
    """The loop of examples/accelerate_loop.py."""
    step = []
    for batch in loader:
        step.append(batch)
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(batch[0]), batch[1]))
            if accelerator.sync_gradients:
                for _ in cram.rule.passes:
                    with cram.compressed(grad_scaler=accelerator.scaler):
                        for place, (x, y) in enumerate(step, 1):
                            last = place == len(step)
                            with nullcontext() if last else accelerator.no_sync(model):
                                accelerator.backward(cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
                step = []
            optimizer.step()
            optimizer.zero_grad()


def by_hand(model, optimizer, accumulate):
    batches = list(data())
    for first in range(0, len(batches), accumulate):
        step = batches[first : first + accumulate]

        def backward(step=step):
            for x, y in step:
                (cross_entropy(model(x), y) / accumulate).backward()

        optimizer.zero_grad()
        backward()
        for _ in optimizer.rule.passes:
            with optimizer.compressed():
                backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def accelerator(accumulate=1):
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)


@pytest.mark.parametrize(("rule", "accumulate"), [(CRAM_PLUS, 1), (CRAM_PLUS, 2), (C_SAM, 2)])
def test_the_weights_are_those_of_a_bare_loop(rule, accumulate):
    ours, by = made(rule)
    by_hand(ours, by, accumulate)
    theirs, cram = made(rule)
    engine = accelerator(accumulate)
    train(engine, *engine.prepare(theirs, cram, data()), cram)
    assert same(snapshot(ours), snapshot(theirs))
    state, expected = cram.state_dict()["cram"], by.state_dict()["cram"]
    assert torch.equal(state["generator"], expected["generator"])
    assert state["uses"] == expected["uses"]


@pytest.mark.parametrize("scale", [2.0**10, 2.0**126])  # the latter overflows
def test_a_scaler_does_not_change_the_step_or_skips_it(scale, monkeypatch):
    monkeypatch.setattr("test_accelerate.CLIP", float("inf"))  # which unscales on CUDA only
    ours, by = made()
    start = snapshot(ours)
    by_hand(ours, by, 2)
    theirs, cram = made()
    engine = accelerator(2)
    engine.scaler = GradScaler("cpu", init_scale=scale)
    model, optimizer, loader = engine.prepare(theirs, cram, data())
    train(engine, model, optimizer, loader, cram)
    if scale == 2.0**126:
        assert optimizer.step_was_skipped
        assert same(start, snapshot(theirs))
        return
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_to_resume_equals_not_to_stop(tmp_path):
    whole, cram = made()
    engine = accelerator(2)
    model, optimizer, loader = engine.prepare(whole, cram, data())
    train(engine, model, optimizer, loader, cram)
    engine.save_state(str(tmp_path))
    train(engine, model, optimizer, loader, cram)

    again, cram = made()
    torch.nn.init.ones_(again[0].weight)
    engine = accelerator(2)
    model, optimizer, loader = engine.prepare(again, cram, data())
    engine.load_state(str(tmp_path))
    train(engine, model, optimizer, loader, cram)
    assert same(snapshot(whole), snapshot(again))
