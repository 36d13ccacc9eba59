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

from torchcram import C_SAM, CRAM_PLUS, CrAM, split_batch

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
OPERATORS = ("global:0.5", "nm:2:4")
CLIP = 0.05
WHOLE, HALF, HALVES = (1.0, 1.0), (1.0, 0.5), (0.5, 0.5)  # shares of a batch


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


def train(accelerator, model, optimizer, loader, cram, shares=WHOLE):
    """The loop of examples/accelerate_loop.py, with shares of every batch."""
    step = []
    for batch in loader:
        (inputs, labels), compressed = split_batch(batch, *shares)
        step.append(compressed)
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(inputs), labels))
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


def by_hand(model, optimizer, accumulate, shares=WHOLE):
    def backward(step):
        for x, y in step:
            (cross_entropy(model(x), y) / accumulate).backward()

    dense, compressed = (6 * share for share in shares)  # rows of a batch
    batches = list(data())
    for first in range(0, len(batches), accumulate):
        step = batches[first : first + accumulate]
        optimizer.zero_grad()
        backward([(x[: int(dense)], y[: int(dense)]) for x, y in step])
        for _ in optimizer.rule.passes:
            with optimizer.compressed():
                backward([(x[6 - int(compressed) :], y[6 - int(compressed) :]) for x, y in step])
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()


def accelerator(accumulate=1):
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)


@pytest.mark.parametrize(
    ("rule", "accumulate", "shares"),
    [
        (CRAM_PLUS, 1, WHOLE),
        (CRAM_PLUS, 2, WHOLE),
        (C_SAM, 2, WHOLE),
        (CRAM_PLUS, 1, HALVES),
        (CRAM_PLUS, 2, HALF),
        (C_SAM, 2, HALVES),
    ],
)
def test_the_weights_are_those_of_a_bare_loop(rule, accumulate, shares):
    ours, by = made(rule)
    by_hand(ours, by, accumulate, shares)
    theirs, cram = made(rule)
    engine = accelerator(accumulate)
    train(engine, *engine.prepare(theirs, cram, data()), cram, shares)
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


@pytest.mark.parametrize("shares", [WHOLE, HALVES])
def test_to_resume_equals_not_to_stop(tmp_path, shares):
    whole, cram = made()
    engine = accelerator(2)
    model, optimizer, loader = engine.prepare(whole, cram, data())
    train(engine, model, optimizer, loader, cram, shares)
    engine.save_state(str(tmp_path))
    train(engine, model, optimizer, loader, cram, shares)

    again, cram = made()
    torch.nn.init.ones_(again[0].weight)
    engine = accelerator(2)
    model, optimizer, loader = engine.prepare(again, cram, data())
    engine.load_state(str(tmp_path))
    train(engine, model, optimizer, loader, cram, shares)
    assert same(snapshot(whole), snapshot(again))
