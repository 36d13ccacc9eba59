"""Batches of a dataset that is kept on the device as a whole and augmented there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from torchcram.experiments.data.images.datasets import Images
from torchcram.experiments.ranks import WHOLE, Shard
from torchcram.experiments.seeds import seeded

RESIDENT = ("none", "shift", "crop-flip")
STREAMED = "resized-crop-flip"
AUGMENTS = (*RESIDENT, STREAMED)


def check_augment(augment: str, allowed: tuple[str, ...] = AUGMENTS) -> None:
    """Raises ValueError if an augmentation is not one of `allowed`."""
    if augment not in allowed:
        raise ValueError(f"augment {augment!r} is not one of {', '.join(map(repr, allowed))}")


def margins(augment: str, height: int, width: int) -> tuple[int, int]:
    """Returns the numbers of black rows above and below an image and of columns at its sides."""
    check_augment(augment, RESIDENT)
    if augment == "none":
        return 0, 0
    if augment == "shift":
        return 1, 1
    return height // 8, width // 8


def draw(
    count: int, augment: str, size: tuple[int, int], *, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draws a crop, and whether to flip it, for each of `count` images.

    Args:
        count: Number of images.
        augment: Augmentation, one of `RESIDENT`.
        size: Height and width of an image without its margins.
        generator: Generator to draw from.

    Returns:
        Index of the first pixel to read in the padded and flattened image, and the direction to
        read a row in: 1, or -1 if it is flipped.
    """
    height, width = size
    above, aside = margins(augment, height, width)
    top = torch.randint(2 * above + 1, (count,), generator=generator)
    left = torch.randint(2 * aside + 1, (count,), generator=generator)
    flip = torch.randint(2 if augment == "crop-flip" else 1, (count,), generator=generator)
    first = top * (width + 2 * aside) + left + flip * (width - 1)
    return first, 1 - 2 * flip


NO_LABEL = -100  # the label that cross_entropy ignores


class ResidentBatches:
    """Batches of normalised, augmented images, put together on the device.

    `start_epoch` draws all random numbers of an epoch ahead, into tensors whose addresses never
    change, so that a CUDA graph that contains `batch` serves every epoch (see `CapturableBatches`;
    all batches have one shape). The draws depend on the seed and the epoch only; the values are the
    same, bit for bit, on every device.
    """

    has_one_shape = True

    def __init__(
        self,
        images: Images,
        *,
        batch_size: int,
        augment: str,
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        device: torch.device | str,
        seed: int,
        train: bool,
        shard: Shard = WHOLE,
    ) -> None:
        """Copies the images to the device.

        Args:
            images: Images of one split.
            batch_size: Number of images in a batch; a smaller dataset is one batch.
            augment: Augmentation of training images: "none"; "shift", moved by up to a pixel;
                "crop-flip", moved by up to an eighth of the size, and flipped left to right or not.
                Gaps are black.
            mean: Mean per channel, where black is 0 and white 1.
            std: Standard deviation per channel, in the same unit.
            device: Device that the images are kept on and batches are made on.
            seed: Seed of order and augmentation.
            train: Whether the order is random, the images are augmented, and an incomplete last
                batch is left out; otherwise all images come in their order, as they are.
            shard: Rows of every training batch, or whole test batches, that this rank takes.
        """
        check_augment(augment, RESIDENT)
        count, height, width, channels = images.images.shape
        if batch_size < 1 or not count:
            raise ValueError(f"batch size {batch_size} of {count} images: both must be at least 1")
        if len(mean) != channels or len(std) != channels:
            raise ValueError(
                f"mean {mean} and std {std} must have {channels} values, one per channel"
            )
        self.train = train
        self.batch_size = min(batch_size, count)
        self._steps = count // self.batch_size if train else -(-count // self.batch_size)
        self._numbers = range(self._steps) if train else shard.among(self._steps)
        self._places = shard.within(self.batch_size) if train else slice(None)
        self._seed, self._augment = seed, augment if train else "none"
        self._source = images.labels
        self._size = (height, width)

        above, aside = margins(self._augment, height, width)
        pixels = images.images.to(device)
        if above or aside:
            # padded once, so that a crop never leaves its image
            pixels = F.pad(pixels, (0, 0, aside, aside, above, above))
        self._area = pixels.shape[1] * pixels.shape[2]
        self._pixels = pixels.reshape(-1, channels)
        self._rows = torch.arange(height, device=device).view(-1, 1) * pixels.shape[2]
        self._columns = torch.arange(width, device=device)
        self._mean = _row(mean, width).to(device)
        self._scale = _row(std, width).reciprocal().to(device)

        shape = (self._steps, len(range(self.batch_size)[self._places]))
        self._first = torch.empty(shape, dtype=torch.int64, device=device)
        self._direction = torch.empty_like(self._first)
        self._labels = torch.empty_like(self._first)
        self._next = torch.zeros((), dtype=torch.int64, device=device)  # number of the next batch
        self.start_epoch(0)

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._numbers)

    def start_epoch(self, epoch: int) -> None:
        """Draws order, crops and flips of an epoch, and copies them to the tensors of `batch`."""
        count, needed = len(self._source), self._steps * self.batch_size
        generator = seeded(self._seed, epoch)
        if self.train:
            order = torch.randperm(count, generator=generator)[:needed]
        else:
            order = torch.arange(needed).clamp(max=count - 1)
        first, direction = draw(needed, self._augment, self._size, generator=generator)
        labels = self._source[order]
        labels[count:] = NO_LABEL
        for kept, drawn in (
            (self._first, order * self._area + first),
            (self._direction, direction),
            (self._labels, labels),
        ):
            kept.copy_(drawn.view(self._steps, -1)[:, self._places])
        self._next.zero_()

    def stage_each_shape(self) -> Iterator[int]:
        """Stages a batch for the only graph, whose key is 0."""
        yield 0

    def stage_next(self) -> int:
        """Returns the key of the graph; it counts the batches on the device by itself."""
        return 0

    def staged_batch(self, key: int) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Returns the next training batch and counts it, on the device alone."""
        batch = self.batch(self._next)
        self._next.add_(1).remainder_(self._steps)
        return batch

    def batch(self, step: Tensor) -> tuple[Tensor, Tensor]:
        """Returns images, (b, channels, h, w) in channels_last, and labels of one batch.

        It runs on the device alone: nothing waits for the host, and shapes are the same for every
        step. An incomplete last test batch is filled with copies of its last image that have the
        label `NO_LABEL`.

        Args:
            step: Number of the batch in the epoch, a scalar int64 tensor on the device.
        """
        row = step.view(1)
        first = self._first.index_select(0, row).view(-1, 1, 1)
        direction = self._direction.index_select(0, row).view(-1, 1, 1)
        read = first + self._rows + direction * self._columns  # (b, h, w)
        pixels = self._pixels.index_select(0, read.flatten())
        # whole rows, since a CPU is slow with an innermost dimension of three
        values = pixels.view(len(first), self._size[0], -1).float()
        values = values.sub_(self._mean).mul_(self._scale)  # two roundings on every device
        images = values.view(len(first), *self._size, -1).permute(0, 3, 1, 2)
        return images, self._labels.index_select(0, row).view(-1)

    def epoch(self, epoch: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the batches of an epoch; the last test batch may be smaller."""
        self.start_epoch(epoch)
        steps = torch.arange(self._steps, device=self._first.device)
        for number in self._numbers:
            images, labels = self.batch(steps[number])
            left = len(self._source) - number * self.batch_size
            yield images[:left], labels[:left]


def _row(values: Sequence[float] | Tensor, width: int) -> Tensor:
    """Returns values per channel as a row of an image, scaled to pixels of 0 to 255."""
    return torch.as_tensor(values, dtype=torch.float64).mul(255).float().cpu().repeat(width)
