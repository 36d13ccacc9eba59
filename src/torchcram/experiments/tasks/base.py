"""Base class of the tasks: data, model, batches, loss and metric of one kind of problem."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from torchcram.experiments.io.cache import Report
from torchcram.experiments.models import build_model
from torchcram.experiments.ranks import SINGLE, Ranks

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.data.config import DataConfig
    from torchcram.experiments.models.config import ModelConfig
    from torchcram.weights import Weights

ACCURACY = "accuracy"
TENTH = 10  # fine-tuning takes this part of the epochs and of the learning rate


class Dataset(Protocol):
    """A dataset of any kind, with the facts about it that a run records."""

    @property
    def name(self) -> str:
        """Name of the dataset."""

    @property
    def train(self) -> Sized:
        """Training split."""

    @property
    def test(self) -> Sized:
        """Test split."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the model's outputs."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Mean of the training images per channel; empty for other data."""

    @property
    def contents(self) -> str:
        """Digest of the contents; empty where name, sizes, classes and mean tell enough."""


class Batches(Protocol):
    """Batches of one split; they depend on nothing but the seed and the epoch."""

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the inputs and labels of an epoch, on the device."""


@dataclass(frozen=True)
class Score:
    """Result of a test.

    Attributes:
        value: Value of the metric that counts: from 0 to 1, more is better; or a perplexity.
        metric: Name of that metric; see `experiments.metrics`.
        others: Further metrics by name.
    """

    value: float
    metric: str = ACCURACY
    others: dict[str, float] | None = None


@dataclass(frozen=True)
class FinetuneDefaults:
    """How a compressed model is fine-tuned unless the user says otherwise.

    Attributes:
        epochs: Number of epochs.
        lr: Learning rate at its peak.
        early_stopping: Whether training stops once it does not get better.
    """

    epochs: int
    lr: float
    early_stopping: bool = False


@dataclass(frozen=True)
class Task(ABC):
    """One kind of problem; it holds sections of a recipe and nothing else.

    The trainer, one-shot compression, fine-tuning, export and the benchmark leave everything that
    depends on the kind of data to the task.

    Attributes:
        model: Section `model` of the recipe.
        data: Section `data` of the recipe.
        args: Further settings of the task.
        unit: Plural of what a batch holds: "images".
        has_batchnorm: Whether batch-norm statistics are estimated anew after compression.
        is_transformers: Whether models are those of Transformers.
        can_generate: Whether models are `CausalModel`s, which generate text.
        has_pretrained_head: Whether pretrained models solve the task before any training.
        class_dim: Dimension of the outputs that the scores of one prediction are along.
        compressed_by_default: Regular expression for the names of the weights that are compressed
            where a recipe does not say `only`; None for all that can be.
    """

    model: ModelConfig
    data: DataConfig
    args: dict[str, Any]

    unit: ClassVar[str] = "samples"
    has_batchnorm: ClassVar[bool] = False
    is_transformers: ClassVar[bool] = False
    can_generate: ClassVar[bool] = False
    has_pretrained_head: ClassVar[bool] = False
    class_dim: ClassVar[int] = 1
    compressed_by_default: ClassVar[str | None] = None

    @property
    def metric(self) -> str:
        """Name of the metric that counts."""
        return ACCURACY

    @abstractmethod
    def load(
        self,
        folder: Path | None,
        *,
        download: bool = False,
        report: Report | None = None,
    ) -> Any:  # noqa: ANN401  # a `Dataset` of the task's own kind
        """Loads the dataset.

        Args:
            folder: Folder that the data lies in.
            download: Whether missing data may be downloaded.
            report: Function that is called with a line of text before something that takes long.
        """

    @abstractmethod
    def batches(
        self,
        data: Any,  # noqa: ANN401
        *,
        train: bool,
        batch_size: int,
        device: torch.device,
        seed: int,
        ranks: Ranks = SINGLE,
    ) -> Batches:
        """Returns the training batches, shuffled and augmented, or the test batches.

        Args:
            data: Dataset that `load` returned.
            train: Whether they are training batches.
            batch_size: Size of a training batch over all ranks; the task may choose another for
                test batches.
            device: Device that the batches are put on.
            seed: Seed of order and augmentation.
            ranks: Processes that share the batches.
        """

    @abstractmethod
    def score(
        self,
        model: nn.Module,
        data: Any,  # noqa: ANN401
        batches: Any,  # noqa: ANN401
        *,
        device: torch.device,
        precision: str = "fp32",
        ranks: Ranks = SINGLE,
    ) -> Score:
        """Returns the score of a model on test batches; it is in eval mode meanwhile.

        Args:
            model: Model on `device`.
            data: Dataset that the batches are from.
            batches: Test batches of this rank, as `batches` returned them.
            device: Device of the model.
            precision: "fp32", or "bf16" for autocast on a GPU.
            ranks: Processes that share the test.
        """

    @abstractmethod
    def hold_out(self, data: Any, fraction: float = 0.1, seed: int = 0) -> Any:  # noqa: ANN401
        """Returns the dataset with a part of its training split in place of the test split."""

    @abstractmethod
    def example(self, data: Any, size: int) -> Tensor:  # noqa: ANN401
        """Returns `size` inputs out of the test split, on the CPU.

        Raises:
            ValueError: If the test split has fewer.
        """

    def prompt(self, data: Any, tokens: int) -> Tensor:  # noqa: ANN401, ARG002
        """Returns the first tokens of the test split as a prompt, (1, tokens), on the CPU.

        Raises:
            ValueError: If the test split has fewer, or models do not generate (`can_generate`).
        """
        raise ValueError(f"models for {self.unit} do not generate text")

    def shorten_test(self, data: Any, tokens: int) -> tuple[Any, int]:  # noqa: ANN401, ARG002
        """Returns the dataset with the first tokens of its test split alone, and their number.

        Raises:
            ValueError: If models do not generate (`can_generate`).
        """
        raise ValueError(f"models for {self.unit} do not generate text")

    def build_model(self, *, classes: int, pretrained: bool) -> nn.Module:
        """Returns the model with initial or with pretrained weights."""
        config = self.model
        return build_model(config.name, classes=classes, pretrained=pretrained, args=config.args)

    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Returns the training loss: cross-entropy, with label smoothing."""
        return F.cross_entropy(outputs, labels, label_smoothing=smoothing)

    def count_targets(self, labels: Tensor) -> int | Tensor:
        """Returns the number of targets that `loss` is the mean over; by default one per sample.

        The losses of micro-batches are weighted by it. A tensor stays on the device of the labels.
        """
        return len(labels)

    def check_model(  # noqa: B027
        self,
        model: nn.Module,
        data: Any,  # noqa: ANN401
        *,
        device: torch.device,
    ) -> None:
        """Raises ValueError if the model does not fit the data; called before training."""

    def finetuning(self, epochs: int, lr: float) -> FinetuneDefaults:
        """Returns how to fine-tune a compressed model: a tenth of the epochs and learning rate.

        Args:
            epochs: Number of epochs that the model was trained for.
            lr: Learning rate that it was trained with.
        """
        return FinetuneDefaults(max(1, epochs // TENTH), lr / TENTH)

    def check_recipe(self) -> None:  # noqa: B027
        """Raises `BadValue` for sections of the recipe that do not go with the task."""

    def calibration_batches(
        self,
        data: Any,  # noqa: ANN401, ARG002
        samples: int,  # noqa: ARG002
        *,
        batch_size: int,  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
        seed: int,  # noqa: ARG002
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields augmented training batches of equal size to estimate batch-norm statistics on.

        Raises:
            ValueError: If the task does not define them; it must where `has_batchnorm`.
        """
        raise ValueError(f"{type(self).__name__}.has_batchnorm needs calibration_batches")

    def divide_epochs(self, data: Any, parts: int) -> Any:  # noqa: ANN401, ARG002
        """Returns the dataset with training epochs divided into parts, for early stopping.

        Raises:
            ValueError: If the task cannot do that.
        """
        raise ValueError(f"train.early_stopping is for texts; allowed for {self.unit}: null")

    def require_transfer(self) -> None:
        """Raises ValueError if models of the task cannot get a new head for other data."""
        raise ValueError(
            f"models for {self.unit} are not transferred; allowed: recipes about images"
        )

    def require_same_data(self, tasks: Sequence[Task]) -> None:  # noqa: B027
        """Raises ValueError if tasks need other data than this one, so that it is loaded once."""

    def notes(self, data: Any, batch_size: int) -> list[str]:  # noqa: ANN401, ARG002
        """Returns lines about the training batches that a user should see; by default none."""
        return []

    def count_test(self, data: Any) -> str:  # noqa: ANN401
        """Returns the size of the test split in words: "360 test images"."""
        return f"{len(data.test)} test {self.unit}"

    def save_pretrained(
        self,
        model: nn.Module,  # noqa: ARG002
        folder: Path,  # noqa: ARG002
        *,
        operator: str | None = None,  # noqa: ARG002
        weights: Weights | None = None,  # noqa: ARG002
    ) -> None:
        """Writes a model as Transformers loads it.

        Args:
            model: Model of the task.
            folder: Folder to write into.
            operator: Operator that quantized the model, to write its integers packed in the format
                of `compressed-tensors`; None writes all weights as they are.
            weights: Weights of the model that the operator compressed.

        Raises:
            ValueError: If the task does not have models of Transformers (`is_transformers`).
        """
        raise ValueError(f"{self.model.name} is no model of Transformers")

    def describe_inputs(self, data: Any) -> dict[str, Any]:  # noqa: ANN401, ARG002
        """Returns what the model takes and what its outputs mean, in types of JSON, for exports."""
        return {}

    def dynamic_dims(self) -> list[dict[int, Any]] | None:
        """Returns the dimensions of inputs other than the batch that vary, for ONNX export."""
        return None

    def require_size(self, data: Any, size: int) -> None:  # noqa: ANN401
        """Raises ValueError unless the test split has `size` samples."""
        if not 1 <= size <= len(data.test):
            raise ValueError(
                f"batch {size}: {data.name!r} has 1 to {len(data.test)} test {self.unit}"
            )


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Returns a context that computes in bfloat16 on a GPU where `precision` is "bf16"."""
    return torch.autocast(
        device.type, torch.bfloat16, enabled=precision == "bf16" and device.type == "cuda"
    )
