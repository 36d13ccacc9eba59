"""Image classification: images of one size, or files that are decoded while training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torchcram.experiments.data.images import (
    EncodedDataset,
    ImageDataset,
    calibration_batches,
    hold_out,
    load_data,
    make_batches,
)
from torchcram.experiments.io.cache import Report
from torchcram.experiments.machine import cores
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.base import Batches, Score, Task, autocast
from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import Tensor, nn

TEST_PIXELS = 1 << 21  # about as many per batch fit any GPU and keep it busy
TEST_BATCH = (64, 2048)  # least and greatest number of images in a test batch


@dataclass(frozen=True)
class ImageClassification(Task):
    """Classification of images, scored by accuracy."""

    unit: ClassVar[str] = "images"
    has_batchnorm: ClassVar[bool] = True

    def load(
        self,
        folder: Path | None,
        *,
        download: bool = False,
        report: Report | None = None,
    ) -> ImageDataset | EncodedDataset:
        """Loads the images, decoded into memory or as files."""
        return load_data(self.data, folder, download=download, report=report)

    def describe_inputs(self, data: ImageDataset | EncodedDataset) -> dict[str, Any]:
        """Returns shape, normalisation and classes; resized images are cut out of the centre."""
        return {
            "inputs": "float32, (batch, channels, height, width): (x - mean) / std per channel, "
            "where black is 0 and white is 1",
            "shape": list(self.image_shape(data)),
            "mean": list(data.mean),
            "std": list(data.std),
            "classes": list(data.classes),
        }

    def batches(
        self,
        data: ImageDataset | EncodedDataset,
        *,
        train: bool,
        batch_size: int,
        device: torch.device,
        seed: int,
        ranks: Ranks = SINGLE,
    ) -> Batches:
        """Returns training batches, or test batches of a size that suits the images."""
        if not train:
            _, height, width = self.image_shape(data)
            batch_size = max(TEST_BATCH[0], min(TEST_PIXELS // (height * width), TEST_BATCH[1]))
        processes = ranks.local_world_size
        return make_batches(
            data,
            train=train,
            batch_size=batch_size,
            augment=self.data.augment,
            device=device,
            seed=seed,
            image_size=self.data.image_size,
            workers=None if processes == 1 else max(1, cores() // processes),
            shard=ranks.shard,
        )

    def score(
        self,
        model: nn.Module,
        data: ImageDataset | EncodedDataset,  # noqa: ARG002
        batches: Batches,
        *,
        device: torch.device,
        precision: str = "fp32",
        ranks: Ranks = SINGLE,
    ) -> Score:
        """Returns the accuracy of a model."""
        return Score(accuracy(model, batches.epoch(0), device, precision=precision, ranks=ranks))

    def hold_out(
        self, data: ImageDataset | EncodedDataset, fraction: float = 0.1, seed: int = 0
    ) -> ImageDataset | EncodedDataset:
        """Returns the dataset with a part of every class of the training images to test on."""
        return hold_out(data, fraction, seed)  # type: ignore[type-var]  # of its kind

    def example(self, data: ImageDataset | EncodedDataset, size: int) -> Tensor:
        """Returns the first test images."""
        self.require_size(data, size)
        batches = make_batches(
            data,
            train=False,
            batch_size=size,
            augment=self.data.augment,
            device=torch.device("cpu"),
            seed=0,
            image_size=self.data.image_size,
            workers=0,
        )
        images, _ = next(iter(batches.epoch(0)))
        return images.contiguous()

    @torch.no_grad()
    def check_model(
        self, model: nn.Module, data: ImageDataset | EncodedDataset, *, device: torch.device
    ) -> None:
        """Raises ValueError unless the model maps an image to a score for every class."""
        shape, name = self.image_shape(data), self.model.name
        try:
            scores = model.eval()(torch.zeros(1, *shape, device=device))
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"model {name!r} does not take the images of {data.name!r}, "
                f"{'x'.join(map(str, shape))}: {error}"
            ) from error
        actual = tuple(scores.shape) if isinstance(scores, torch.Tensor) else type(scores).__name__
        if actual != (1, len(data.classes)):
            raise ValueError(
                f"model {name!r} gives {actual} for an image of {data.name!r}; allowed: a "
                f"tensor of shape {(1, len(data.classes))}, a score for every class"
            )

    def calibration_batches(
        self,
        data: ImageDataset | EncodedDataset,
        samples: int,
        *,
        batch_size: int,
        device: torch.device,
        seed: int,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields augmented training images."""
        return calibration_batches(
            data,
            samples,
            batch_size,
            augment=self.data.augment,
            device=device,
            seed=seed,
            image_size=self.data.image_size,
        )

    def require_transfer(self) -> None:
        """Does nothing, as the last layer can be replaced."""

    def image_shape(self, data: ImageDataset | EncodedDataset) -> tuple[int, int, int]:
        """Returns the channels, height and width of the images that a model sees."""
        if isinstance(data, ImageDataset):
            height, width, channels = data.test.images.shape[1:]
            return channels, height, width
        size = self.data.image_size or 1
        return 3, size, size


@torch.no_grad()
def accuracy(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    device: torch.device,
    *,
    precision: str = "fp32",
    ranks: Ranks = SINGLE,
) -> float:
    """Returns the fraction of samples that a model classifies correctly.

    The device is waited for once, at the end.

    Args:
        model: Model on `device`; all its modules are put back into the mode they were in.
        batches: Inputs and labels of this rank.
        device: Device that they are moved to.
        precision: "fp32", or "bf16" for autocast on a GPU.
        ranks: Processes whose counts are added up.

    Raises:
        ValueError: If there is no batch.
    """
    correct = torch.zeros((), dtype=torch.int64, device=device)
    total = 0
    with eval_mode(model):
        for inputs, labels in batches:
            with autocast(device, precision):
                scores = model(inputs.to(device, non_blocking=True))
            correct += (scores.argmax(1) == labels.to(device, non_blocking=True)).sum()
            total += len(labels)
    all_correct, all_samples = ranks.all_reduce_sum(int(correct), total)
    if not all_samples:
        raise ValueError("there is nothing to evaluate on: no batch came")
    return all_correct / all_samples
