"""What the demonstration does, and what it found."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from torchcram import GlobalTopK, parse_operator


@dataclass(frozen=True)
class DemoSettings:
    """What the demonstration does; the defaults train for about half a minute on one core.

    Attributes:
        epochs: of CrAM+, whose steps take two passes; SGD trains for twice as many.
        batch_size: of both trainings.
        lr: the learning rate at the start; it falls to 0 along a cosine.
        momentum: of SGD, which is also the base optimizer of CrAM+.
        weight_decay: likewise.
        rho: length of the ascent of CrAM+.
        levels: the sparsities out of which every step of CrAM+ draws one.
        targets: the operators to compress to after training, as text.
        widths: channels of the convolutions.
        tuning_samples: how many training samples batch-norm tuning sees, about.
        timed_images: of the batch that nets are timed on.
        seed: of the initial weights, the batches and the draws.
    """

    epochs: int = 80
    batch_size: int = 64
    lr: float = 0.2
    momentum: float = 0.9
    weight_decay: float = 5e-4
    rho: float = 0.1
    levels: tuple[float, ...] = (0.5, 0.7, 0.8, 0.9, 0.95)
    targets: tuple[str, ...] = (
        "global:0.5",
        "global:0.7",
        "global:0.8",
        "global:0.9",
        "global:0.95",
        "nm:2:4",
        "int4",
        "global:0.8+int4",
    )
    widths: tuple[int, ...] = (12, 24, 48)
    tuning_samples: int = 1000
    timed_images: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "tuning_samples", "timed_images"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is not a positive number")
        if not self.levels or not self.targets:
            raise ValueError(
                f"levels={self.levels!r} and targets={self.targets!r}: both need at least one entry"
            )
        if len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets={self.targets!r} name an operator twice")
        for level in self.levels:
            GlobalTopK(level)  # refuses what is no sparsity
        for text in self.targets:
            operator = parse_operator(text)
            if operator.draw(torch.Generator()) != operator:
                raise ValueError(f"target {text!r} is a range; a target is one operator")


@dataclass(frozen=True)
class Trained:
    """A training that was done: its method, epochs, dense test accuracy and seconds."""

    method: str
    epochs: int
    accuracy: float
    seconds: float = field(compare=False)  # all else is the same when run again


@dataclass(frozen=True)
class Row:
    """A model compressed in one shot.

    Attributes:
        method: how it was trained.
        operator: what it was compressed by, as text.
        sparsity: the fraction of zeros in its compressible weights.
        before: its test accuracy, from 0 to 1, with the batch-norm statistics of training.
        after: the same with statistics estimated anew.
    """

    method: str
    operator: str
    sparsity: float
    before: float
    after: float


@dataclass(frozen=True)
class Deployed:
    """A net trained by CrAM+ as a file, and how fast it runs on the CPU, in one thread.

    Attributes:
        operator: what it was compressed by, as text, or "dense".
        plain_bytes: of a plain safetensors file.
        compact_bytes: of a compact file.
        torch_ms: milliseconds of a batch in torch, which computes with all zeros.
        runtime_ms: the same by `torchcram.runtime`; None where it cannot run the net.
        note: what the runtime did.
    """

    operator: str
    plain_bytes: int
    compact_bytes: int
    torch_ms: float | None = field(compare=False)
    runtime_ms: float | None = field(compare=False)
    note: str = field(compare=False)


@dataclass(frozen=True)
class DemoResult:
    """All that the demonstration found; equal for equal settings on one machine."""

    settings: DemoSettings
    weights: int
    train_images: int
    test_images: int
    trained: tuple[Trained, ...]
    rows: tuple[Row, ...]
    deployed: tuple[Deployed, ...]
    versions: dict[str, str]

    def row(self, method: str, operator: str) -> Row:
        """Returns what `method` came to under `operator`."""
        return next(r for r in self.rows if (r.method, r.operator) == (method, operator))

    def change(self, row: Row) -> float:
        """Returns how far the accuracy after tuning is above that of the same dense model."""
        dense = next(t.accuracy for t in self.trained if t.method == row.method)
        return row.after - dense
