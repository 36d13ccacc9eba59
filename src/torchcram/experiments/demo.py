"""The demonstration: one small net, trained by SGD and by CrAM+, compressed to many targets."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from torchcram import (
    CRAM_PLUS,
    CrAM,
    GlobalTopK,
    compress,
    compressible_weights,
    sparsity,
    tune_batchnorm_,
)
from torchcram.experiments.bench.record import DENSE
from torchcram.experiments.data.images.digits import Digits, load_digits
from torchcram.experiments.demo_deploy import deploy
from torchcram.experiments.demo_result import DemoResult, DemoSettings, Row, Trained
from torchcram.experiments.machine import machine_name, versions
from torchcram.experiments.models import ConvNet
from torchcram.experiments.seeds import global_seed

PLAIN, AWARE = "SGD", CRAM_PLUS.name
FIRST_CONV = r"^features\.0\."  # has one input channel, out of which no N:M group can be made

Progress = Callable[[str, int, int], None]
"""Called with the method, the epochs done and all its epochs: before the first, after each."""


def run_demo(settings: DemoSettings, progress: Progress | None = None) -> DemoResult:
    """Trains the same net from the same weights by SGD and by CrAM+; compresses both in one shot.

    The nets of CrAM+, trained last, also become files and are timed.

    Args:
        settings: what to do.
        progress: told about every epoch.
    """
    data = load_digits()
    with global_seed(settings.seed):
        initial = ConvNet(settings.widths)
    trained, rows = [], []
    with _one_thread():
        for method, epochs in ((PLAIN, 2 * settings.epochs), (AWARE, settings.epochs)):
            model = copy.deepcopy(initial)
            start = time.perf_counter()
            _train(model, data, settings, method=method, epochs=epochs, progress=progress)
            seconds = time.perf_counter() - start
            trained.append(Trained(method, epochs, accuracy(model, data), seconds))
            models: dict[str, nn.Module] = {DENSE: model}
            for target in settings.targets:
                models[target], row = _compressed(model, data, settings, method, target)
                rows.append(row)
        deployed = deploy(models, data.test_images[: settings.timed_images])
    return DemoResult(
        settings=settings,
        weights=sum(weight.numel() for weight in compressible_weights(initial).values()),
        train_images=len(data.train_labels),
        test_images=len(data.test_labels),
        trained=tuple(trained),
        rows=tuple(rows),
        deployed=deployed,
        versions={**versions(), "machine": machine_name(torch.device("cpu"))},
    )


def _train(
    model: nn.Module,
    data: Digits,
    settings: DemoSettings,
    *,
    method: str,
    epochs: int,
    progress: Progress | None,
) -> None:
    optimizer: Optimizer = SGD(
        model.parameters(),
        lr=settings.lr,
        momentum=settings.momentum,
        weight_decay=settings.weight_decay,
    )
    if method == AWARE:
        operators = [GlobalTopK(level) for level in settings.levels]
        optimizer = CrAM(model, optimizer, operators, rho=settings.rho, seed=settings.seed)
    scheduler = CosineAnnealingLR(optimizer, epochs)
    generator = torch.Generator().manual_seed(settings.seed)
    report = progress or (lambda *_: None)
    report(method, 0, epochs)
    model.train()
    for epoch in range(epochs):
        for images, labels in data.training_batches(settings.batch_size, generator):
            optimizer.step(_closure(model, optimizer, images, labels))
        scheduler.step()
        report(method, epoch + 1, epochs)


def _closure(
    model: nn.Module, optimizer: Optimizer, images: Tensor, labels: Tensor
) -> Callable[[], float]:
    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return float(loss.detach())

    return closure


def _compressed(
    model: nn.Module, data: Digits, settings: DemoSettings, method: str, target: str
) -> tuple[nn.Module, Row]:
    skip = FIRST_CONV if "nm:" in target else None
    small = compress(model, target, weights=compressible_weights(model, skip=skip))
    before = accuracy(small, data)
    # every model sees the same samples
    generator = torch.Generator().manual_seed(settings.seed + 1)
    batches = data.training_batches(settings.batch_size, generator)
    tune_batchnorm_(small, islice(batches, -(-settings.tuning_samples // settings.batch_size)))
    zeros = sparsity(compressible_weights(small))
    return small, Row(method, target, zeros, before, accuracy(small, data))


@torch.no_grad()
def accuracy(model: nn.Module, data: Digits) -> float:
    """Returns the fraction of test images that `model`, in eval mode from here on, gets right."""
    model.eval()
    right = model(data.test_images).argmax(1) == data.test_labels
    return int(right.sum()) / len(right)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Works in one thread, little slower with a net this small, whatever the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
