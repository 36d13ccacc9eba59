from collections import Counter

import pytest
import torch

from torchcram.experiments.data.images.digits import Digits, load_digits, shifted


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def digits():
    return load_digits()


@pytest.fixture
def numbered():
    """Images that are all of one value, their number, so that shifting hardly changes them."""
    images = torch.arange(100.0).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    return Digits(images, torch.arange(100), images[:1], torch.zeros(1), background=-1.0)


def test_split_is_stratified_and_the_same_every_time(digits):
    assert digits.train_images.shape == (1437, 1, 8, 8)
    assert digits.test_images.shape == (360, 1, 8, 8)
    for label, count in Counter(digits.test_labels.tolist()).items():
        total = count + int((digits.train_labels == label).sum())
        assert count / total == pytest.approx(0.2, abs=0.01)
    again = load_digits()
    assert torch.equal(again.train_images, digits.train_images)
    assert torch.equal(again.test_labels, digits.test_labels)


def test_no_test_image_was_trained_on(digits):
    train = {tuple(image.flatten().tolist()) for image in digits.train_images}
    assert not any(tuple(image.flatten().tolist()) in train for image in digits.test_images)


def test_training_images_are_normalised(digits):
    assert float(digits.train_images.mean()) == pytest.approx(0, abs=1e-5)
    assert float(digits.train_images.std()) == pytest.approx(1, abs=1e-5)
    assert float(digits.train_images.min()) == pytest.approx(digits.background)


def test_shifts_move_by_at_most_a_pixel_and_fill_with_background():
    image = torch.zeros(1, 1, 8, 8)
    image[0, 0, 3, 4] = 1
    moved = shifted(image.expand(500, 1, 8, 8), -7.0, generator())
    places = Counter(tuple(place) for place in (moved == 1).nonzero()[:, 2:].tolist())
    assert set(places) == {(row, column) for row in (2, 3, 4) for column in (3, 4, 5)}
    assert min(places.values()) > 500 / 9 / 2
    assert set(moved.unique().tolist()) == {-7.0, 0.0, 1.0}
    assert bool((moved[:, :, 1:-1, 1:-1] != -7).all())


def test_shifts_differ_from_image_to_image_and_repeat_with_the_seed(digits):
    images = digits.train_images[:50]
    one = shifted(images, digits.background, generator(3))
    assert torch.equal(one, shifted(images, digits.background, generator(3)))
    assert not torch.equal(one, shifted(images, digits.background, generator(4)))


def test_an_epoch_shows_every_image_once_with_its_label(numbered):
    batches = list(numbered.training_batches(32, generator()))
    assert [len(labels) for _, labels in batches] == [25] * 4
    for images, labels in batches:
        assert torch.equal(images[:, 0, 4, 4], labels.float())
    labels = torch.cat([labels for _, labels in batches])
    assert labels.tolist() != list(range(100))
    assert sorted(labels.tolist()) == list(range(100))


def test_the_generator_decides_the_order(numbered):
    def order(seed):
        return [labels.tolist() for _, labels in numbered.training_batches(10, generator(seed))]

    assert order(1) == order(1) != order(2)


def test_a_batch_may_be_larger_than_the_data(numbered):
    assert len(list(numbered.training_batches(1000, generator()))) == 1


def test_a_bad_batch_size_is_refused(numbered):
    with pytest.raises(ValueError, match="batch size must be at least 1, got 0"):
        next(numbered.training_batches(0, generator()))
