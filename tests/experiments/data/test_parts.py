import pytest
import torch
from PIL import Image

from torchcram.experiments.data.images import (
    EncodedImages,
    Images,
    ResidentBatches,
    Shard,
    StreamBatches,
)
from torchcram.experiments.data.images.datasets import ImageFile

COUNT, BATCH = 23, 7


def resident(train, part):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(256, (COUNT, 8, 8, 3), generator=generator).to(torch.uint8)
    return ResidentBatches(
        Images(pixels, torch.arange(COUNT)),
        batch_size=BATCH,
        augment="crop-flip",
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        device="cpu",
        seed=3,
        train=train,
        shard=part,
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(COUNT):
        Image.new("RGB", (9, 9), (number * 10, 5, 99)).save(folder / f"{number}.png")
    return [ImageFile(str(folder / f"{number}.png")) for number in range(COUNT)]


def streamed(files, train, part):
    return StreamBatches(
        EncodedImages(files, torch.arange(COUNT)),
        batch_size=BATCH,
        augment="resized-crop-flip",
        image_size=8,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        device="cpu",
        seed=3,
        train=train,
        workers=0,
        shard=part,
    )


@pytest.fixture(params=["resident", "streamed"])
def batches(request, files):
    """Called with whether to train and with a part."""
    if request.param == "resident":
        return resident
    return lambda train, part: streamed(files, train, part)


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_the_parts_of_a_training_batch_are_the_batch(batches, of):
    whole = batches(True, Shard())
    parts = [batches(True, Shard(number, of)) for number in range(of)]
    assert {len(part) for part in parts} == {len(whole)} == {COUNT // BATCH}
    for epoch in (0, 4):
        together = zip(*(part.epoch(epoch) for part in parts), strict=True)
        for (images, labels), pieces in zip(whole.epoch(epoch), together, strict=True):
            assert {len(piece) for _, piece in pieces} <= {BATCH // of, -(-BATCH // of)}
            assert torch.equal(torch.cat([piece for piece, _ in pieces]), images)
            assert torch.equal(torch.cat([piece for _, piece in pieces]), labels)


@pytest.mark.parametrize("of", [1, 2, 3, 9])
def test_the_parts_of_a_test_are_whole_batches_each_once(batches, of):
    whole = list(batches(False, Shard()).epoch(0))
    found = {}
    for number in range(of):
        part = batches(False, Shard(number, of))
        taken = list(part.epoch(0))
        assert len(part) == len(taken)
        found.update({int(labels[0]): (images, labels) for images, labels in taken})
    assert sorted(found) == [int(labels[0]) for _, labels in whole] == [0, 7, 14, 21]
    for images, labels in whole:
        assert torch.equal(found[int(labels[0])][0], images)
        assert torch.equal(found[int(labels[0])][1], labels)


def test_a_part_may_not_be_empty(batches):
    with pytest.raises(ValueError, match="a batch of 7 images cannot be divided into 8 parts"):
        batches(True, Shard(0, 8))


def test_shares_add_up():
    assert [Shard(number, 3).share(7) for number in range(3)] == [2 / 7, 2 / 7, 3 / 7]
    assert Shard().share(64) == 1
