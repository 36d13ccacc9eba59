"""Methods with scores, gates or thresholds on a GPU: as on the CPU, and without waiting for it."""

import copy

import pytest
import torch
from problems import adamw, batches, build, sgd, train

from torchcram import sparsity
from torchcram.baselines import L0, PLATON, STR, Movement, SoftMovement, SparsitySchedule
from torchcram.baselines.scores import as_magnitudes
from torchcram.operators import GlobalTopK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*debug mode is a"),
]
SCHEDULE = SparsitySchedule(begin=2, end=8, interval=3)
METHODS = {
    "STR": lambda model, base: STR(model, base, "global:0.75", initial=-3.0),
    "l0": lambda model, base: L0(model, base, "global:0.75", penalty=30),
    "movement": lambda model, base: Movement(model, base, "global:0.75", schedule=SCHEDULE),
    "soft movement": lambda model, base: SoftMovement(
        model, base, "global:0.75", schedule=SCHEDULE, threshold=0.499, penalty=4
    ),
    "PLATON": lambda model, base: PLATON(model, base, "global:0.75", schedule=SCHEDULE),
}
SELECTING = {"movement": (2, 5, 8, 11), "PLATON": (2, 5, 8, 11)}


def on_gpu(data):
    return [(inputs.cuda(), labels.cuda()) for inputs, labels in data]


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("base_of", [sgd, adamw])
def test_steps_do_not_wait_and_agree_with_the_cpu(name, base_of):
    expected, model = build(), build().cuda()
    other = METHODS[name](expected, base_of(expected))
    optimizer = METHODS[name](model, base_of(model))
    for step, (batch, there) in enumerate(zip(batches(), on_gpu(batches()), strict=True)):

        def closure(there=there):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(there[0]), there[1])
            loss.backward()
            return loss

        torch.cuda.synchronize()
        waits = step < 2 or step in SELECTING.get(name, ())  # the first steps compile kernels
        torch.cuda.set_sync_debug_mode("default" if waits else "error")
        try:
            optimizer.step(closure)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        train(expected, other, [batch])
    optimizer.finish()
    other.finish()
    assert sparsity(optimizer.weights) == sparsity(other.weights)
    if name == "l0":
        return  # its random numbers are those of the device
    for here, there in zip(expected.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_a_resumed_training_is_the_same_bit_for_bit(name):
    model = build().cuda()
    optimizer = METHODS[name](model, sgd(model))
    train(model, optimizer, on_gpu(batches())[:5])
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, on_gpu(batches())[5:])
    second = build(seed=5).cuda()
    after = METHODS[name](second, sgd(second))
    second.load_state_dict(saved[0])
    after.load_state_dict(saved[1])
    train(second, after, on_gpu(batches())[5:])
    for ours, theirs in zip(second.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_selection_by_signed_scores_is_that_of_the_cpu():
    scores = {"a": torch.randn(300, 500), "b": torch.randn(64, 64, 3, 3).neg_().sub_(1)}
    there = {name: score.cuda() for name, score in scores.items()}
    for sparsity_ in (0.1, 0.5, 0.95):
        operator = GlobalTopK(sparsity_)
        expected = operator.select(as_magnitudes(scores, scores))
        for name, mask in operator.select(as_magnitudes(there, there)).items():
            assert torch.equal(mask.cpu(), expected[name])
