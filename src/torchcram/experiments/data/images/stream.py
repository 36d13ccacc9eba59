"""Batches of encoded images, which are decoded while training."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from torchcram.experiments.data.images.datasets import EncodedImages, decode
from torchcram.experiments.data.images.resident import STREAMED, check_augment
from torchcram.experiments.ranks import WHOLE, Shard
from torchcram.experiments.seeds import global_seed, mixed, seeded

MAX_WORKERS = 16
MARGIN = 256 / 224  # short side of a test image before the crop, relative to image_size

AugmentedIndex = tuple[int, int]  # index of an image, and the seed of its augmentation


class StreamBatches:
    """Batches of normalised images; order and augmentation depend on seed and epoch only.

    Every image is augmented with a seed of its own, so that the number of workers does not matter.
    """

    def __init__(
        self,
        images: EncodedImages,
        *,
        batch_size: int,
        augment: str,
        image_size: int,
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        device: torch.device | str,
        seed: int,
        train: bool,
        workers: int | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        """Sets up the workers, which start with the first epoch.

        Args:
            images: Images of one split.
            batch_size: Number of images in a batch; a smaller dataset is one batch.
            augment: Augmentation of training images: "resized-crop-flip", a random part of the
                image at a random scale, flipped left to right or not; "none", its centre.
            image_size: Height and width of the crop.
            mean: Mean per channel, where black is 0 and white 1.
            std: Standard deviation per channel, in the same unit.
            device: Device that the batches are put on.
            seed: Seed of order and augmentation.
            train: Whether the order is random, the images are augmented, and an incomplete last
                batch is left out; otherwise all images come in their order, cut at the centre.
            workers: Number of processes that decode. 0 decodes in this process; None takes as many
                as there are cores.
            shard: Rows of every training batch, or whole test batches, that this rank takes.
        """
        check_augment(augment, ("none", STREAMED))
        if min(batch_size, image_size, len(images)) < 1:
            raise ValueError(
                f"batch size {batch_size} of {len(images)} images of size {image_size}: "
                "all must be at least 1"
            )
        self._plan = _Plan(len(images), min(batch_size, len(images)), seed, train, shard)
        self._device = torch.device(device)
        self._mean = _channels(mean).to(device)
        self._scale = _channels(std).reciprocal().to(device)
        if workers is None:
            workers = min(MAX_WORKERS, os.cpu_count() or 1)
        self._loader = DataLoader(
            _Decoded(images, image_size, augment=train and augment == STREAMED),
            batch_sampler=self._plan,
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # the global one stays untouched
        )

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._plan)

    def epoch(self, epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields images, (b, 3, size, size) in channels_last, and labels of every batch."""
        self._plan.epoch = epoch
        for images, labels in self._loader:
            moved = images.to(self._device, non_blocking=True)
            values = moved.float().contiguous(memory_format=torch.channels_last)
            values.sub_(self._mean).mul_(self._scale)
            yield values, labels.to(self._device, non_blocking=True)


class _Plan(Sampler[list[AugmentedIndex]]):
    """Samples the batches of an epoch: indices of images, each with a seed."""

    def __init__(self, count: int, batch_size: int, seed: int, train: bool, shard: Shard) -> None:
        self.epoch = 0
        self._count, self._batch_size = count, batch_size
        self._seed, self._train = seed, train
        steps = count // batch_size if train else -(-count // batch_size)
        self._numbers = range(steps) if train else shard.among(steps)
        self._places = shard.within(batch_size) if train else slice(None)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[list[AugmentedIndex]]:
        order = torch.arange(self._count)
        if self._train:
            order = torch.randperm(self._count, generator=seeded(self._seed, self.epoch))
        for number in self._numbers:
            chosen = order[number * self._batch_size :][: self._batch_size][self._places]
            yield [(index, mixed(self._seed, self.epoch, index)) for index in chosen.tolist()]


class _Decoded(Dataset[tuple[Tensor, int]]):
    """Decodes, crops and augments one image at a time."""

    def __init__(self, images: EncodedImages, image_size: int, *, augment: bool) -> None:
        from torchvision.transforms import v2

        self._images, self._labels = images.images, images.labels
        if augment:
            cut = [v2.RandomResizedCrop(image_size), v2.RandomHorizontalFlip()]
        else:
            cut = [v2.Resize(round(image_size * MARGIN)), v2.CenterCrop(image_size)]
        self._transform = v2.Compose([*cut, v2.PILToTensor()])

    def __getitem__(self, index: AugmentedIndex) -> tuple[Tensor, int]:
        number, seed = index
        image = decode(self._images[number])
        with global_seed(seed):  # torchvision draws from the global generator
            return self._transform(image), int(self._labels[number])


def _channels(values: Sequence[float] | Tensor) -> Tensor:
    """Returns values per channel, scaled to pixels of 0 to 255, to broadcast over a batch."""
    return torch.as_tensor(values, dtype=torch.float64).mul(255).float().cpu().view(1, -1, 1, 1)
