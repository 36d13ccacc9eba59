import pytest
import torch
from image_trees import tree

from torchcram.experiments.data.images import (
    ImageDataset,
    Images,
    ResidentBatches,
    StreamBatches,
    calibration_batches,
    make_batches,
)
from torchcram.experiments.data.images.folders import read_folder


def some(count):
    return Images(torch.randint(256, (count, 8, 8, 3), dtype=torch.uint8), torch.arange(count))


@pytest.fixture
def data():
    return ImageDataset("all", some(50), some(20), tuple(map(str, range(50))))


def calibration(data, samples=20, batch_size=8, *, seed=0, augment="crop-flip"):
    return list(
        calibration_batches(data, samples, batch_size, augment=augment, device="cpu", seed=seed)
    )


def test_resident_data_gives_resident_batches(data):
    for train, count in ((True, 48), (False, 20)):
        batches = make_batches(
            data, train=train, batch_size=16, augment="crop-flip", device="cpu", seed=0
        )
        assert isinstance(batches, ResidentBatches)
        assert sum(len(labels) for _, labels in batches.epoch(0)) == count


def test_files_give_streamed_batches(tmp_path):
    pytest.importorskip("torchvision")
    found = read_folder(tree(tmp_path, size=(20, 20)))
    settings = {"batch_size": 4, "augment": "resized-crop-flip", "device": "cpu", "seed": 0}
    with pytest.raises(ValueError, match="need image_size"):
        make_batches(found, train=True, **settings)
    batches = make_batches(found, train=False, image_size=7, workers=0, **settings)
    assert isinstance(batches, StreamBatches)
    assert [tuple(images.shape) for images, _ in batches.epoch(0)] == [(4, 3, 7, 7), (2, 3, 7, 7)]
    del settings["batch_size"]
    tuning = calibration_batches(found, 5, 3, image_size=7, **settings)
    assert [len(labels) for _, labels in tuning] == [2, 2]


@pytest.mark.parametrize(
    ("samples", "batch_size", "sizes"),
    [(20, 8, [6, 6, 6]), (16, 8, [8, 8]), (5, 8, [5]), (1000, 16, [12] * 4), (1, 1, [1])],
)
def test_calibration_batches_are_of_one_size(data, samples, batch_size, sizes):
    got = calibration(data, samples, batch_size)
    assert [len(labels) for _, labels in got] == sizes
    labels = torch.cat([labels for _, labels in got]).tolist()
    assert len(set(labels)) == len(labels)


def test_calibration_depends_on_the_seed_only(data):
    def drawn(seed):
        return [
            (images.tolist(), labels.tolist()) for images, labels in calibration(data, seed=seed)
        ]

    before = torch.get_rng_state()
    one = drawn(1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert drawn(1) == one != drawn(2)


def test_calibration_images_are_augmented_training_images(data):
    plain = {
        tuple(i.flatten().tolist()) for i, _ in _each(calibration(data, 50, 50, augment="none"))
    }
    moved = [tuple(i.flatten().tolist()) for i, _ in _each(calibration(data, 50, 50))]
    assert len(plain) == 50
    assert 0 < sum(image in plain for image in moved) < 50


def _each(batches):
    return [pair for images, labels in batches for pair in zip(images, labels, strict=True)]


@pytest.mark.parametrize(("samples", "batch_size"), [(0, 8), (8, 0)])
def test_no_samples_are_refused(data, samples, batch_size):
    with pytest.raises(ValueError, match="both must be at least 1"):
        calibration(data, samples, batch_size)
