"""Handwritten digits that come with scikit-learn: 1797 grey images of 8x8, ten classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

TEST_FRACTION = 0.2
SPLIT_SEED = 0  # the split is the same for every seed of a training
MAX_SHIFT = 1  # pixels


@dataclass(frozen=True, eq=False)
class Digits:
    """The digits, split and normalised.

    Attributes:
        train_images: Training images, (n, 1, 8, 8), of zero mean and unit variance over all pixels.
        train_labels: Labels of the training images, (n,), 0 to 9.
        test_images: Test images, (m, 1, 8, 8), normalised by the mean and variance of the training
            images.
        test_labels: Labels of the test images, (m,), 0 to 9.
        background: Value of an empty pixel after normalisation.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    background: float

    def training_batches(
        self, size: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields one epoch of shuffled, augmented batches of images and labels.

        Batches differ in size by one at most: a last batch of a few samples would give poor
        batch-norm statistics.
        """
        if size < 1:
            raise ValueError(f"batch size must be at least 1, got {size!r}")
        order = torch.randperm(len(self.train_labels), generator=generator)
        for chosen in order.tensor_split(max(1, -(-len(order) // size))):
            images = shifted(self.train_images[chosen], self.background, generator)
            yield images, self.train_labels[chosen]


def load_digits() -> Digits:
    """Loads the digits, normalised, as `split_digits` divides them."""
    train, labels, test, test_labels = split_digits()
    train, test = (pixels.div(16).float().unsqueeze(1) for pixels in (train, test))
    mean, std = train.mean(), train.std()
    return Digits(
        train_images=(train - mean) / std,
        train_labels=labels,
        test_images=(test - mean) / std,
        test_labels=test_labels,
        background=float(-mean / std),
    )


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the images and labels of the training split, then those of the test split.

    Images are (n, 8, 8) with values from 0 to 16. About 80 % are to train on, every class alike.
    Nothing is downloaded: the images are part of scikit-learn.
    """
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    digits = datasets.load_digits()
    train, test, labels, test_labels = train_test_split(
        digits.images,
        digits.target,
        test_size=TEST_FRACTION,
        stratify=digits.target,
        random_state=SPLIT_SEED,
    )
    parts = (train, labels, test, test_labels)
    return tuple(map(torch.tensor, parts))  # type: ignore[return-value]


def shifted(images: Tensor, background: float, generator: torch.Generator) -> Tensor:
    """Moves every image by up to a pixel in each direction; gaps are filled with `background`."""
    count, _, height, width = images.shape
    padded = F.pad(images, (MAX_SHIFT,) * 4, value=background)
    corner = torch.randint(2 * MAX_SHIFT + 1, (2, count, 1), generator=generator)
    rows = corner[0] + torch.arange(height)  # (count, height)
    columns = corner[1] + torch.arange(width)  # (count, width)
    which = torch.arange(count)[:, None, None]
    return padded[which, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)
