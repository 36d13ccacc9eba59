from collections import Counter

import pytest
import torch

from torchcram.experiments.data.images.digits import split_digits


@pytest.fixture(scope="module")
def digits():
    return split_digits()


def test_split_is_stratified_and_the_same_every_time(digits):
    train, labels, test, test_labels = digits
    assert train.shape == (1437, 8, 8)
    assert test.shape == (360, 8, 8)
    assert (float(train.min()), float(train.max())) == (0, 16)
    for label, count in Counter(test_labels.tolist()).items():
        total = count + int((labels == label).sum())
        assert count / total == pytest.approx(0.2, abs=0.01)
    assert all(map(torch.equal, split_digits(), digits))


def test_no_test_image_was_trained_on(digits):
    train = {tuple(image.flatten().tolist()) for image in digits[0]}
    assert not any(tuple(image.flatten().tolist()) in train for image in digits[2])
