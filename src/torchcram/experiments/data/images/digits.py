"""Handwritten digits that come with scikit-learn: 1797 grey images of 8x8, ten classes."""

from __future__ import annotations

import torch
from torch import Tensor

TEST_FRACTION = 0.2
SPLIT_SEED = 0  # the split is the same for every seed of a training


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns training images, their labels, test images and their labels.

    Images are of shape (n, 8, 8) with values from 0 to 16. About 80 % are for training, with the
    same share of every class. Nothing is downloaded: the images are part of scikit-learn.
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
