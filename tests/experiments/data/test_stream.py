import pytest
import torch
from image_trees import tree

from torchcram.experiments.data.images import StreamBatches
from torchcram.experiments.data.images.datasets import IMAGENET_MEAN, IMAGENET_STD, EncodedImages
from torchcram.experiments.data.images.folders import read_folder

pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return read_folder(tree(tmp_path_factory.mktemp("stream"), count=5, size=(40, 30)))


def batches(pictures, **changes):
    settings = {"batch_size": 4, "augment": "resized-crop-flip", "image_size": 14, "device": "cpu"}
    settings |= {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "seed": 0, "train": True, "workers": 0}
    return StreamBatches(pictures, **(settings | changes))


def all_of(stream, epoch=0):
    images, labels = zip(*stream.epoch(epoch), strict=True)
    return torch.cat(images), torch.cat(labels)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_batches_are_normalised_and_in_channels_last(files):
    stream = batches(files.train)
    assert len(stream) == 2
    got = list(stream.epoch(0))
    assert [tuple(images.shape) for images, _ in got] == [(4, 3, 14, 14)] * 2
    for images, labels in got:
        assert images.is_contiguous(memory_format=torch.channels_last)
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = (got[0][0] * std + mean) * 255
    assert torch.allclose(pixels, pixels.round(), atol=1e-3)
    assert 0 <= float(pixels.round().min()) < float(pixels.round().max()) <= 255


def test_an_epoch_depends_on_seed_and_number_only(files):
    stream = batches(files.train)
    expected = all_of(stream, 3)
    torch.manual_seed(5)
    all_of(stream, 1)
    assert same(all_of(stream, 3), expected)
    assert not same(all_of(stream, 4), expected)
    assert not same(all_of(batches(files.train, seed=1), 3), expected)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_number_of_workers_does_not_matter(files):
    stream = batches(files.train, workers=2)
    for epoch in (0, 1):
        assert same(all_of(stream, epoch), all_of(batches(files.train), epoch))


def test_the_global_generator_is_left_alone(files):
    before = torch.get_rng_state()
    all_of(batches(files.train))
    assert torch.equal(torch.get_rng_state(), before)


def test_images_keep_their_labels_and_are_augmented(files):
    """One image in all places: its crops differ, since each has random numbers of its own."""
    one = EncodedImages(files.train.images[:1] * 8, torch.arange(8))
    images, labels = all_of(batches(one, batch_size=8))
    assert sorted(labels.tolist()) == list(range(8))
    assert labels.tolist() != list(range(8))
    assert len({tuple(image.flatten().tolist()) for image in images}) == 8


def test_a_test_is_in_order_complete_and_cut_at_the_centre(files):
    stream = batches(files.test, train=False)
    assert len(stream) == 3
    assert [len(labels) for _, labels in stream.epoch()] == [4, 4, 2]
    images, labels = all_of(stream)
    assert labels.tolist() == [0] * 5 + [1] * 5
    assert same(all_of(stream, 1), (images, labels))
    from torchvision.transforms import v2

    whole = v2.Compose([v2.Resize(16), v2.CenterCrop(14), v2.PILToTensor()])
    expected = whole(files.test.images[0].open().convert("RGB")).float() / 255
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    assert torch.allclose(images[0], (expected - mean) / std, atol=1e-5)


def test_training_without_augmentation_shows_the_centres(files):
    numbered = EncodedImages(files.test.images, torch.arange(10))
    plain, order = all_of(batches(numbered, augment="none", batch_size=10))
    assert order.tolist() != list(range(10))
    assert torch.equal(plain, all_of(batches(numbered, train=False))[0][order])


def test_a_batch_may_be_larger_than_the_data(files):
    assert [len(labels) for _, labels in batches(files.train, batch_size=99).epoch()] == [10]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"augment": "crop-flip"}, "'crop-flip' is not one of 'none', 'resized-crop-flip'"),
        ({"batch_size": 0}, "batch size 0 of 10 images of size 14"),
        ({"image_size": 0}, "of size 0"),
    ],
)
def test_bad_settings_are_refused(files, changes, message):
    with pytest.raises(ValueError, match=message):
        batches(files.train, **changes)


def test_a_damaged_file_is_named(tmp_path):
    found = read_folder(tree(tmp_path))
    (tmp_path / "pets" / "train" / "dog" / "0001.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"train/dog/0001.jpg is not a readable image"):
        all_of(batches(found.train))
