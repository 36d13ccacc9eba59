import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchcram.experiments.data.images import (
    EncodedDataset,
    EncodedImages,
    ImageDataset,
    Images,
    hold_out,
)
from torchcram.experiments.data.images.datasets import ImageFile


def some(count, classes=2, size=4, channels=3):
    images = torch.randint(256, (count, size, size, channels), dtype=torch.uint8)
    return Images(images, torch.arange(count) % classes)


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        (torch.zeros(2, 4, 4, 3), torch.zeros(2).long(), r"must be uint8 .*float32"),
        (torch.zeros(2, 4, 4).byte(), torch.zeros(2).long(), r"\(2, 4, 4\)"),
        (
            torch.zeros(2, 4, 4, 3).byte(),
            torch.zeros(3).long(),
            r"must be int64 of shape \(2,\), got .* \(3,\)",
        ),
        (torch.zeros(2, 4, 4, 3).byte(), torch.zeros(2), r"labels must be int64 .* torch.float32"),
    ],
)
def test_images_of_another_form_are_refused(images, labels, message):
    with pytest.raises(ValueError, match=message):
        Images(images, labels)


def test_a_data_set_that_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="2 classes: labels must be from 0 to 1, got 0 to 2"):
        ImageDataset("pets", some(6), some(6, classes=3), ("cat", "dog"))
    with pytest.raises(ValueError, match="'pets' has a split without images"):
        ImageDataset("pets", some(6), some(0), ("cat", "dog"))
    with pytest.raises(ValueError, match=r"\(4, 4, 3\), tests on \(5, 5, 3\)"):
        ImageDataset("pets", some(6), some(6, size=5), ("cat", "dog"))


def test_mean_and_deviation_are_those_of_the_training_pixels():
    data = ImageDataset("pets", some(50), some(7), ("cat", "dog"))
    pixels = data.train.images.double().view(-1, 3) / 255
    assert data.mean == pytest.approx(pixels.mean(0).tolist())
    assert data.std == pytest.approx(pixels.std(0, correction=0).tolist())


def test_a_channel_of_one_value_can_be_divided_by_its_deviation():
    images = Images(torch.full((3, 2, 2, 1), 51, dtype=torch.uint8), torch.zeros(3).long())
    data = ImageDataset("flat", images, images, ("all",))
    assert (data.mean, data.std) == (pytest.approx((0.2,)), (1.0,))


def test_given_mean_and_deviation_are_kept():
    data = ImageDataset("pets", some(4), some(4), ("cat", "dog"), (0.1,) * 3, (0.2,) * 3)
    assert (data.mean, data.std) == ((0.1,) * 3, (0.2,) * 3)


def numbered(labels):
    """Images that are their own number, so that they can be told apart."""
    count = len(labels)
    images = torch.arange(count).view(-1, 1, 1, 1).byte()
    return Images(images, torch.tensor(labels))


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    fraction=st.floats(0.05, 0.95),
    seed=st.integers(0, 5),
)
def test_holding_out_divides_every_class(sizes, fraction, seed):
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    train = numbered(labels)
    data = ImageDataset("all", train, train, tuple(map(str, range(len(sizes)))))
    expected = [min(round(fraction * size), size - 1) for size in sizes]
    if not any(expected):
        with pytest.raises(ValueError, match="less than one image"):
            hold_out(data, fraction, seed)
        return
    held = hold_out(data, fraction, seed)
    assert torch.bincount(held.test.labels, minlength=len(sizes)).tolist() == expected
    both = held.train.images.flatten().tolist() + held.test.images.flatten().tolist()
    assert sorted(both) == train.images.flatten().tolist()
    for split in (held.train, held.test):
        assert torch.equal(split.labels, train.labels[split.images.flatten().long()])
    assert (held.mean, held.std) == (data.mean, data.std)


def test_the_seed_decides_what_is_held_out():
    data = ImageDataset("all", numbered([0] * 100), numbered([0]), ("one",))

    def held(seed):
        return hold_out(data, 0.1, seed).test.images.flatten().tolist()

    assert held(1) == held(1) != held(2)
    assert held(1) != list(range(10))


def test_pictures_can_be_held_out_too():
    pictures = EncodedImages(
        tuple(ImageFile(f"{number}.jpg") for number in range(10)), torch.arange(10) % 2
    )
    held = hold_out(EncodedDataset("files", pictures, pictures, ("cat", "dog")), 0.2)
    assert (len(held.train), len(held.test)) == (8, 2)
    for split in (held.train, held.test):
        for picture, label in zip(split.images, split.labels.tolist(), strict=True):
            assert int(picture.name.removesuffix(".jpg")) % 2 == label
    names = {picture.name for split in (held.train, held.test) for picture in split.images}
    assert len(names) == 10


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 1.5, float("nan")])
def test_a_fraction_out_of_range_is_refused(fraction):
    data = ImageDataset("all", numbered([0] * 10), numbered([0]), ("one",))
    with pytest.raises(ValueError, match="must be between 0 and 1"):
        hold_out(data, fraction)
