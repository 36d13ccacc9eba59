import multiprocessing
import sys
from collections import Counter

import pytest
import torch
from image_trees import Choice, archive, encoded, image, tree

from torchcram.experiments.data.images import (
    EncodedDataset,
    ImageDataset,
    ResidentBatches,
    dataset_names,
    load_data,
)
from torchcram.experiments.data.images.digits import split_digits

PACKED = "pets.native.packed.safetensors"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torchcram"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def equal(a, b):
    return (a.name, a.classes, a.mean, a.std) == (b.name, b.classes, b.mean, b.std) and all(
        torch.equal(x.images, y.images) and torch.equal(x.labels, y.labels)
        for x, y in ((a.train, b.train), (a.test, b.test))
    )


def test_digits_are_normalised_by_the_training_images():
    data = load_data(Choice("digits", "shift"), None)
    train, train_labels, test, test_labels = split_digits()
    mean, std = train.mean(), train.std()
    assert data.train.images.shape == (1437, 8, 8, 1)
    assert data.classes == tuple("0123456789")
    for split, images, labels in (
        (data.train, train, train_labels),
        (data.test, test, test_labels),
    ):
        batches = ResidentBatches(
            split, batch_size=2000, augment="none", mean=data.mean, std=data.std, device="cpu",
            seed=0, train=False,
        )  # fmt: skip
        ((got, got_labels),) = batches.epoch()
        assert torch.equal(got_labels, labels)
        assert torch.allclose(got, ((images - mean) / std).float().unsqueeze(1), atol=1e-3)
    assert Counter(data.train.images.unique().tolist()) == Counter(range(0, 241, 15))


def test_digits_can_be_large_and_in_colour():
    small, large, colour = (
        load_data(Choice("digits", image_size=size, color=color), None)
        for size, color in ((8, False), (64, False), (64, True))
    )
    assert small.test.images.shape == (360, 8, 8, 1)
    assert large.test.images.shape == (360, 64, 64, 1)
    assert colour.test.images.shape == (360, 64, 64, 3)
    assert all(
        torch.equal(part, large.test.images[..., 0]) for part in colour.test.images.unbind(3)
    )
    assert torch.equal(colour.train.labels, small.train.labels)
    means = large.train.images.double().mean((1, 2, 3)), small.train.images.double().mean((1, 2, 3))
    assert torch.allclose(*means, atol=6)  # the same pictures
    assert len(set(colour.mean)) == 1


def test_digits_are_not_streamed():
    with pytest.raises(ValueError, match="'digits' is resident"):
        load_data(Choice("digits", "resized-crop-flip", 8), None)


def test_a_folder_is_packed_once(folder, monkeypatch):
    root = tree(folder)
    lines = []
    data = load_data(Choice("pets"), folder, report=lines.append)
    assert isinstance(data, ImageDataset)
    assert data.train.images.shape == (6, 8, 10, 3)
    assert lines == [f"packing pets into {folder / PACKED}"]
    monkeypatch.setattr("torchcram.experiments.data.images.packed.pack", None)
    for where in (folder, root):
        assert equal(load_data(Choice("pets"), where, report=lines.append), data)
    assert len(lines) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["pets", PACKED]


def test_archives_are_packed_without_being_unpacked(folder, tmp_path):
    root = tree(tmp_path / "tree", splits=("train", "val"))
    for part in ("train", "val"):
        archive(root, folder / f"pets-{part}.tar.xz", [part])
    data = load_data(Choice("pets", image_size=6), folder)
    assert data.train.images.shape == (6, 6, 6, 3)
    names = ["pets-train.tar.xz", "pets-val.tar.xz", "pets.6.packed.safetensors"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert equal(load_data(Choice("pets", image_size=6), root), data)


def test_a_read_only_folder_is_left_alone(folder, cache, monkeypatch):
    tree(folder)
    folder.chmod(0o555)
    try:
        data = load_data(Choice("pets"), folder)
        assert [path.name for path in folder.iterdir()] == ["pets"]
        assert [path.name for path in cache.iterdir()] == [PACKED]
        monkeypatch.setattr("torchcram.experiments.data.images.packed.pack", None)
        assert equal(load_data(Choice("pets"), folder), data)
    finally:
        folder.chmod(0o755)


@pytest.mark.parametrize("content", [b"", b"foreign", None])
def test_a_damaged_packed_file_is_named_and_made_anew(folder, content):
    tree(folder)
    data = load_data(Choice("pets"), folder)
    whole = (folder / PACKED).read_bytes()
    (folder / PACKED).unlink()  # `data` has it mapped
    (folder / PACKED).write_bytes(whole[:-1] if content is None else content)
    with pytest.warns(UserWarning, match=f"{PACKED} is not the packed dataset .* made anew"):
        again = load_data(Choice("pets"), folder)
    assert equal(again, data)
    assert (folder / PACKED).read_bytes() == whole


def test_a_packed_file_of_other_images_is_made_anew(folder):
    root = tree(folder)
    load_data(Choice("pets"), folder)
    (root / "train" / "cat" / "new.jpg").write_bytes(encoded(image(77)))
    with pytest.warns(UserWarning, match="its source is"):
        assert len(load_data(Choice("pets"), folder).train) == 7
    assert len(load_data(Choice("pets"), folder).train) == 7


def test_a_packed_file_is_enough(folder):
    root = tree(folder)
    data = load_data(Choice("pets"), folder)
    root.rename(folder / "moved")
    assert equal(load_data(Choice("pets"), folder), data)
    (folder / "pets").mkdir()
    assert equal(load_data(Choice("pets"), folder / "pets"), data)
    with pytest.raises(ValueError, match="'pets' is not in"):
        load_data(Choice("pets", image_size=8), folder)
    (folder / PACKED).unlink()
    (folder / PACKED).write_bytes(b"foreign")
    with pytest.raises(ValueError, match=f"{PACKED} is not the packed dataset"):
        load_data(Choice("pets"), folder)


def test_a_failure_while_packing_leaves_no_file(folder):
    root = tree(folder)
    (root / "test" / "dog" / "0002.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match=r"test/dog/0002.jpg is not a readable image"):
        load_data(Choice("pets"), folder)
    assert [path.name for path in folder.iterdir()] == ["pets"]


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are text there")
def test_a_class_may_have_a_name_that_is_no_text(folder):
    tree(folder, classes=("caf\udce9", "dog"))
    data = load_data(Choice("pets"), folder)
    assert data.classes == ("caf\udce9", "dog")
    assert equal(load_data(Choice("pets"), folder), data)


def test_what_a_killed_process_left_while_packing_is_removed(folder):
    tree(folder)
    (folder / f".{PACKED}.123.tmp").write_bytes(b"half")
    (folder / ".mine.tmp").write_bytes(b"not ours")
    load_data(Choice("pets"), folder)
    assert sorted(path.name for path in folder.iterdir()) == [".mine.tmp", "pets", PACKED]


def test_processes_that_need_a_packed_file_at_once_make_it_once(folder):
    pytest.importorskip("fcntl")
    tree(folder)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.map(pack_and_count, [(folder, number) for number in range(3)])
    assert len(list(folder.parent.glob("said-*"))) == 1
    assert sorted(path.name for path in folder.iterdir()) == ["pets", PACKED]


def pack_and_count(arguments):
    folder, number = arguments
    load_data(Choice("pets"), folder, report=(folder.parent / f"said-{number}").write_text)


def test_streamed_files_are_not_packed(folder, monkeypatch):
    tree(folder)
    monkeypatch.setattr("torchcram.experiments.data.images.packed.pack", None)
    data = load_data(Choice("pets", "resized-crop-flip", 8), folder)
    assert isinstance(data, EncodedDataset)
    assert (len(data.train), len(data.test), data.classes) == (6, 6, ("cat", "dog"))
    with pytest.raises(ValueError, match="'resized-crop-flip' needs image_size"):
        load_data(Choice("pets", "resized-crop-flip"), folder)
    with pytest.raises(ValueError, match="'cars' is not in"):
        load_data(Choice("cars", "resized-crop-flip", 8), folder)


def test_archives_are_to_be_unpacked_for_streaming(folder, tmp_path):
    archive(tree(tmp_path / "tree"), folder / "pets.tar.xz")
    with pytest.raises(ValueError, match=r"unpack the archives of 'pets' .*tar -xJf"):
        load_data(Choice("pets", "resized-crop-flip", 8), folder)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (
            Choice("pets"),
            r"looked for pets/train, pets.tar.xz .* known by name: digits, cifar10",
        ),
        (Choice("cifar10"), r"cifar-10-batches-py, .* CIFAR10 has it; download it"),
        (Choice("stanford-cars"), r"stanford_cars, .* it cannot be downloaded"),
        (Choice("../pets"), r"'../pets' is not the name of a folder"),
        (Choice(".."), r"'..' is not the name of a folder"),
        (Choice(""), r"'' is not the name of a folder"),
        (Choice("pets", "mixup"), r"augment 'mixup' is not one of 'none', .*'resized-crop-flip'"),
        (Choice("pets", image_size=0), "image_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_loaded_is_named(folder, choice, message):
    with pytest.raises(ValueError, match=message):
        load_data(choice, folder)
    assert not list(folder.iterdir())


def test_a_folder_is_needed_for_all_but_digits():
    with pytest.raises(ValueError, match="'cifar10' needs the folder"):
        load_data(Choice("cifar10"), None)


def test_every_name_has_a_line():
    names = dataset_names()
    assert {"digits", "cifar10", "cifar100", "flowers102", "food101", "sun397"} <= set(names)
    assert all(line and "\n" not in line for line in names.values())
