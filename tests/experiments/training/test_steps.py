import pytest
import torch
from runs import CPU, digits, recipe
from torch.nn import functional
from torch.optim import SGD

from torchcram import CrAM
from torchcram.experiments.recipe.build import build_batches, build_initial_model, build_optimizer
from torchcram.experiments.training.steps import EagerStep, Objective, autocast


def prepared(given, seed=0):
    data = digits(train=256, test=10)
    model = build_initial_model(given, classes=10, seed=seed).train()
    optimizer = build_optimizer(given, model, seed=seed)
    batches = build_batches(given, data, train=True, device=CPU, seed=seed)
    return model, optimizer, batches


@torch.no_grad()
def losses(model, batches, smoothing):
    return [
        float(functional.cross_entropy(model(images), labels, label_smoothing=smoothing))
        for images, labels in batches
    ]


def test_losses_are_means_over_the_epoch():
    given = recipe("optimizer.lr=0", "train.label_smoothing=0.1", "cram.operators=[global:0.9]")
    model, optimizer, batches = prepared(given)
    step = EagerStep(model, optimizer, batches, given.train, CPU)
    for epoch in (0, 1):
        step.start_epoch(epoch)
        for _ in range(len(batches)):
            step.run()
        dense, compressed = step.losses()
        expected = losses(model, batches.epoch(epoch), 0.1)
        assert dense == pytest.approx(sum(expected) / len(expected), rel=1e-5)
        assert compressed != pytest.approx(dense)


def test_the_compressed_loss_is_that_of_the_last_pass():
    given = recipe("optimizer.lr=0", "cram.rule=C-SAM", "cram.rho=0.5")
    model, optimizer, batches = prepared(given)
    seen = []
    model.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    step = EagerStep(model, optimizer, batches, given.train, CPU)
    step.start_epoch(0)
    step.run()
    images, labels = next(batches.epoch(0))
    assert all(torch.equal(seen_images, images) for seen_images, _ in seen)
    found = [functional.cross_entropy(scores.detach(), labels).item() for _, scores in seen]
    assert len(set(found)) == 3  # at w, at C(w), at C(w + rho h/|h|)
    assert step.losses() == pytest.approx((found[0], found[2]))


@pytest.mark.parametrize(
    ("dense", "compressed", "rows"),
    [(0.5, 0.5, (slice(0, 32), slice(32, 64))), (1, 0.25, (slice(0, 64), slice(48, 64)))],
)
def test_passes_take_their_shares_of_the_batch(dense, compressed, rows):
    given = recipe(f"cram.dense_share={dense}", f"cram.compressed_share={compressed}")
    model, optimizer, batches = prepared(given)
    seen = []
    model.register_forward_hook(lambda _, args, __: seen.append(args[0]))
    step = EagerStep(
        model, optimizer, batches, given.train, CPU, objective=Objective(shares=given.cram.shares)
    )
    step.start_epoch(0)
    step.run()
    images, _ = next(batches.epoch(0))
    assert [len(images) for images in seen] == [len(range(64)[part]) for part in rows]
    assert all(torch.equal(images[part], taken) for part, taken in zip(rows, seen, strict=True))
    assert all(value > 0 for value in step.losses())


def test_plain_steps_do_not_count_as_compressed():
    given = recipe("optimizer.lr=0", "cram.base_step_probability=1.0")
    model, optimizer, batches = prepared(given)
    assert isinstance(optimizer, CrAM)
    step = EagerStep(model, optimizer, batches, given.train, CPU)
    step.start_epoch(0)
    step.run()
    assert step.losses()[1] is None


def test_it_is_the_plain_loop_written_out():
    given = recipe(method="sgd")
    model, optimizer, batches = prepared(given)
    twin, _, _ = prepared(given)
    assert type(optimizer) is SGD
    step = EagerStep(model, optimizer, batches, given.train, CPU)
    step.start_epoch(2)
    for _ in range(len(batches)):
        step.run()
    plain = SGD(twin.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    for images, labels in batches.epoch(2):
        plain.zero_grad()
        functional.cross_entropy(twin(images), labels).backward()
        plain.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


def test_there_are_no_losses_before_a_step():
    given = recipe()
    step = EagerStep(*prepared(given), given.train, CPU)
    step.start_epoch(0)
    with pytest.raises(ValueError, match="no step was taken"):
        step.losses()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_cpu_computes_in_single_precision(precision):
    with autocast(CPU, precision):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
