"""A task on tensors: inputs and labels that fit into memory. The base of tasks of one's own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from torchcram.experiments.io.cache import Report
from torchcram.experiments.io.weights import digest
from torchcram.experiments.ranks import SINGLE, WHOLE, Ranks, Shard
from torchcram.experiments.seeds import seeded
from torchcram.experiments.tasks.base import Score, Task, autocast
from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, eq=False)
class TensorSplit:
    """Inputs with their labels.

    Attributes:
        inputs: Inputs, (n, ...).
        labels: Labels, (n, ...).
    """

    inputs: Tensor
    labels: Tensor

    def __post_init__(self) -> None:
        if len(self.inputs) != len(self.labels) or not len(self.labels):
            raise ValueError(
                f"{len(self.inputs)} inputs and {len(self.labels)} labels; allowed: as many "
                "labels as inputs, at least one"
            )

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, eq=False)
class TensorData:
    """A dataset of tensors.

    Attributes:
        name: Name of the dataset.
        train: Training split.
        test: Test split.
        classes: Names of the model's outputs.
        contents: Digest that tells datasets of one name and size apart; computed if not given.
    """

    name: str
    train: TensorSplit
    test: TensorSplit
    classes: tuple[str, ...]
    contents: str = ""

    def __post_init__(self) -> None:
        if not self.contents:
            tensors = {
                f"{name} {part}": getattr(split, part)
                for name, split in (("train", self.train), ("test", self.test))
                for part in ("inputs", "labels")
            }
            object.__setattr__(self, "contents", digest(tensors))

    @property
    def mean(self) -> tuple[float, ...]:
        """Nothing: only images have a mean per channel."""
        return ()


class TensorBatches:
    """Batches of tensors on a device, shuffled for training.

    Args:
        split: Inputs and labels.
        batch_size: Size of a batch over all ranks.
        device: Device that the tensors are kept on.
        seed: Seed of the order.
        train: Whether to shuffle, and to leave out the last batch where it is incomplete.
        shard: Rows of every training batch, or whole test batches, that this rank takes.
    """

    def __init__(
        self,
        split: TensorSplit,
        *,
        batch_size: int,
        device: torch.device,
        seed: int,
        train: bool,
        shard: Shard = WHOLE,
    ) -> None:
        self._inputs, self._labels = split.inputs.to(device), split.labels.to(device)
        self._size, self._seed = min(batch_size, len(split)), seed
        self._train, self._shard = train, shard

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        count = len(self._labels)
        if self._train:
            return count // self._size
        return len(self._shard.among(-(-count // self._size)))

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of an epoch."""
        count = len(self._labels)
        order = torch.arange(count)
        if self._train:
            order = torch.randperm(count, generator=seeded(self._seed, epoch))
        batches = order.to(self._labels.device).split(self._size)
        if self._train:
            rows = self._shard.within(self._size)
            chosen = [batches[number][rows] for number in range(len(self))]
        else:
            chosen = [batches[number] for number in self._shard.among(len(batches))]
        for index in chosen:
            yield self._inputs[index], self._labels[index]


@dataclass(frozen=True)
class TensorTask(Task):
    """A task on tensors, scored by accuracy: a subclass defines `load`, and more if it differs.

    `loss` is cross-entropy and `measure` accuracy; a task that overrides `measure` says the name of
    its metric by `metric`.
    """

    has_batchnorm: ClassVar[bool] = True

    @abstractmethod
    def load(
        self,
        folder: Path | None,
        *,
        download: bool = False,
        report: Report | None = None,
    ) -> TensorData:
        """Loads the dataset; see `Task.load`."""

    def batches(
        self,
        data: TensorData,
        *,
        train: bool,
        batch_size: int,
        device: torch.device,
        seed: int,
        ranks: Ranks = SINGLE,
    ) -> TensorBatches:
        """Returns training or test batches."""
        return TensorBatches(
            data.train if train else data.test,
            batch_size=batch_size,
            device=device,
            seed=seed,
            train=train,
            shard=ranks.shard,
        )

    def measure(self, outputs: Tensor, labels: Tensor) -> float:
        """Returns the metric of all outputs for the test split: accuracy, unless overridden.

        Args:
            outputs: Outputs of the model, (n, ...), on the CPU.
            labels: Labels, (n, ...), on the CPU.
        """
        return float((outputs.argmax(1) == labels).double().mean())

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        data: TensorData,  # noqa: ARG002
        batches: TensorBatches,
        *,
        device: torch.device,
        precision: str = "fp32",
        ranks: Ranks = SINGLE,
    ) -> Score:
        """Returns what `measure` gives for the outputs of all ranks; below 0 counts as 0."""
        outputs, labels = [], []
        with eval_mode(model):
            for inputs, wanted in batches.epoch(0):
                with autocast(device, precision):
                    outputs.append(model(inputs).float())
                labels.append(wanted)
        on_cpu = [[tensor.cpu() for tensor in part] for part in (outputs, labels)]
        gathered = ranks.all_gather(on_cpu)
        outputs, labels = (
            [tensor for parts in gathered for tensor in parts[which]] for which in (0, 1)
        )
        value = self.measure(torch.cat(outputs), torch.cat(labels))
        if value < 0:  # such as R2 of a model that is worse than the mean
            return Score(0.0, self.metric, {self.metric: value})
        return Score(value, self.metric)

    def check_model(self, model: nn.Module, data: TensorData, *, device: torch.device) -> None:
        """Raises ValueError unless the model takes a batch of two inputs."""
        inputs = data.train.inputs[:1].expand(2, *data.train.inputs.shape[1:]).to(device)
        try:
            with torch.no_grad():
                model.eval()(inputs)
        except (RuntimeError, TypeError) as error:
            raise ValueError(
                f"model {self.model.name!r} does not take the inputs of {data.name!r}, "
                f"{tuple(data.train.inputs.shape[1:])} each: {error}"
            ) from error

    def hold_out(self, data: TensorData, fraction: float = 0.1, seed: int = 0) -> TensorData:
        """Returns the dataset with a random part of the training split to test on."""
        count = len(data.train)
        held = min(max(1, round(fraction * count)), count - 1)
        if not 0 < fraction < 1 or held < 1:
            raise ValueError(
                f"fraction {fraction!r} of {count} training samples cannot be held out"
            )
        order = torch.randperm(count, generator=seeded(seed, "hold out"))
        train, test = (
            TensorSplit(data.train.inputs[index], data.train.labels[index])
            for index in (order[held:].sort().values, order[:held].sort().values)
        )
        return replace(data, train=train, test=test)

    def example(self, data: TensorData, size: int) -> Tensor:
        """Returns the first test inputs."""
        self.require_size(data, size)
        return data.test.inputs[:size]

    def calibration_batches(
        self,
        data: TensorData,
        samples: int,
        *,
        batch_size: int,
        device: torch.device,
        seed: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields training batches of equal size; for subclasses with `has_batchnorm`."""
        order = torch.randperm(len(data.train), generator=seeded(seed, "calibration"))[:samples]
        steps = -(-len(order) // batch_size)
        for index in order[: len(order) // steps * steps].tensor_split(steps):
            yield data.train.inputs[index].to(device), data.train.labels[index].to(device)
