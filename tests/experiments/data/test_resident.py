import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from torchcram.experiments.data.images import NO_LABEL, Images, ResidentBatches
from torchcram.experiments.seeds import mixed

MEAN, STD = (0.3, 0.5, 0.6), (0.2, 0.25, 0.3)


def noise(count, size=(16, 16), channels=3):
    images = torch.randint(1, 256, (count, *size, channels), dtype=torch.uint8)  # nothing is black
    return Images(images, torch.arange(count))


def batches(images, **changes):
    channels = images.images.shape[-1]
    settings = {"batch_size": 4, "augment": "none", "mean": MEAN[:channels], "std": STD[:channels]}
    settings |= {"device": "cpu", "seed": 0, "train": True}
    return ResidentBatches(images, **(settings | changes))


def normalised(images, channels=3):
    mean, std = (torch.tensor(v[:channels]).view(-1, 1, 1) for v in (MEAN, STD))
    return (images.permute(0, 3, 1, 2).float() / 255 - mean) / std


def all_of(resident, epoch=0):
    images, labels = zip(*resident.epoch(epoch), strict=True)
    return torch.cat(images), torch.cat(labels)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def outcomes(image, pad, flips):
    """Every crop of one image, by the usual steps: pad with black, crop, flip, normalise."""
    height, width, channels = image.shape
    padded = F.pad(image.permute(2, 0, 1), (pad[1], pad[1], pad[0], pad[0])).permute(1, 2, 0)
    tops, lefts = range(2 * pad[0] + 1), range(2 * pad[1] + 1)
    crops = [padded[t : t + height, s : s + width] for t, s in itertools.product(tops, lefts)]
    if flips:
        crops += [crop.flip(1) for crop in crops]
    return normalised(torch.stack(crops), channels)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 3]),
    st.sampled_from(["none", "shift", "crop-flip"]),
)  # fmt: skip
def test_every_image_is_one_of_its_crops(height, width, channels, augment):
    images = noise(5, (height, width), channels)
    pad = {"none": (0, 0), "shift": (1, 1), "crop-flip": (height // 8, width // 8)}[augment]
    got, labels = all_of(batches(images, batch_size=5, augment=augment))
    for image, label in zip(got, labels, strict=True):
        possible = outcomes(images.images[label], pad, augment == "crop-flip")
        assert bool((possible - image).abs().flatten(1).amax(1).lt(1e-5).any())


def test_all_crops_and_flips_come_up():
    image = noise(1)
    many = Images(image.images.expand(500, -1, -1, -1), torch.zeros(500).long())
    got, _ = all_of(batches(many, batch_size=500, augment="crop-flip"))
    possible = outcomes(image.images[0], (2, 2), flips=True)
    assert len(possible) == 50
    which = torch.cdist(got.flatten(1), possible.flatten(1)).argmin(1)
    counts = torch.bincount(which, minlength=50)
    assert int(counts.min()) > 0
    assert int(counts.max()) < 40


def test_black_is_padded_before_normalisation():
    white = Images(torch.full((64, 8, 8, 3), 255, dtype=torch.uint8), torch.zeros(64).long())
    got, _ = all_of(batches(white, batch_size=64, augment="shift"))
    for channel in range(3):
        expected = {(value - MEAN[channel]) / STD[channel] for value in (0, 1)}
        found = got[:, channel].unique().tolist()
        assert found == pytest.approx(sorted(expected), abs=1e-5)


def test_an_epoch_shows_every_image_once_but_for_an_incomplete_batch():
    resident = batches(noise(11))
    assert len(resident) == 2
    _, labels = all_of(resident)
    assert len(set(labels.tolist())) == 8
    assert labels.tolist() != sorted(labels.tolist())
    _, later = all_of(resident, 1)
    assert labels.tolist() != later.tolist()


def test_images_keep_their_labels():
    images = noise(8)
    got, labels = all_of(batches(images))
    assert torch.allclose(got, normalised(images.images)[labels], atol=1e-5)


def test_a_batch_may_be_larger_than_the_data():
    _, labels = all_of(batches(noise(3), batch_size=100))
    assert sorted(labels.tolist()) == [0, 1, 2]


def test_a_test_is_in_order_complete_and_not_augmented():
    images = noise(10)
    resident = batches(images, augment="crop-flip", train=False)
    assert len(resident) == 3
    assert [len(labels) for _, labels in resident.epoch(7)] == [4, 4, 2]
    got, labels = all_of(resident)
    assert labels.tolist() == list(range(10))
    assert torch.allclose(got, normalised(images.images), atol=1e-5)


def test_a_test_batch_on_the_device_is_filled_up_without_labels():
    resident = batches(noise(10), train=False)
    images, labels = resident.batch(torch.tensor(2))
    assert labels.tolist() == [8, 9, NO_LABEL, NO_LABEL]
    assert torch.equal(images[3], images[1])
    logits = torch.randn(4, 10)
    loss = F.cross_entropy(logits, labels)
    assert torch.allclose(loss, F.cross_entropy(logits[:2], labels[:2]))


def test_images_are_in_channels_last():
    for images, _ in batches(noise(10), train=False).epoch():
        assert images.dtype == torch.float32
        assert images.is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_depends_on_seed_and_number_only():
    images = noise(12)
    one = batches(images, augment="crop-flip", seed=3)
    expected = all_of(one, 5)
    torch.manual_seed(99)
    torch.rand(7)
    all_of(one, 1)
    assert same(all_of(one, 5), expected)
    other = batches(images, augment="crop-flip", seed=3)
    assert same(all_of(other, 5), expected)
    assert not same(all_of(one, 6), expected)
    assert not same(all_of(batches(images, augment="crop-flip", seed=4), 5), expected)


def test_the_global_generator_is_left_alone():
    images = noise(12)
    before = torch.get_rng_state()
    all_of(batches(images, augment="crop-flip"))
    assert torch.equal(torch.get_rng_state(), before)


def test_seeds_and_epochs_do_not_run_into_each_other():
    assert len({mixed(seed, epoch) for seed in range(50) for epoch in range(50)}) == 2500
    assert mixed(1, 23) != mixed(12, 3)
    assert mixed(0, 0) == 1350176041220068806


def test_a_traced_batch_serves_every_step_of_every_epoch():
    """What is traced once is only device operations, and reads tensors that stay in place."""
    images = noise(12)
    resident = batches(images, augment="crop-flip")
    traced = make_fx(lambda step: resident.batch(step))(torch.tensor(0))
    for epoch, step in itertools.product((0, 1, 5), range(3)):
        resident.start_epoch(epoch)
        fresh = batches(images, augment="crop-flip")
        fresh.start_epoch(epoch)
        assert same(traced(torch.tensor(step)), fresh.batch(torch.tensor(step)))


@pytest.mark.gpu
def test_a_cuda_graph_gives_what_the_cpu_gives():
    images = noise(12)
    host = batches(images, augment="crop-flip")
    resident = batches(images, augment="crop-flip", device="cuda")
    step = torch.zeros((), dtype=torch.int64, device="cuda")
    resident.batch(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = resident.batch(step)
    for epoch, number in itertools.product(range(3), range(3)):
        host.start_epoch(epoch)
        resident.start_epoch(epoch)
        step.fill_(number)
        graph.replay()
        assert same([value.cpu() for value in out], host.batch(torch.tensor(number)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch size 0 of 5 images"),
        ({"augment": "rotate"}, "'rotate' is not one of 'none', 'shift', 'crop-flip'"),
        ({"augment": "resized-crop-flip"}, "is not one of"),
        ({"mean": (0.5,)}, r"mean \(0.5,\) .* must have 3 values"),
        ({"std": (0.5,) * 4}, "must have 3 values, one per channel"),
    ],
)
def test_bad_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        batches(noise(5), **changes)


def test_no_images_are_refused():
    with pytest.raises(ValueError, match="of 0 images"):
        batches(noise(0))
