import zlib
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch
from image_trees import Choice, encoded, image

from torchcram.experiments.data.images import load_data
from torchcram.experiments.data.images.torchvision_sets import SETS, read_torchvision

datasets = pytest.importorskip("torchvision.datasets")


def write(path, content=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    if content is None:
        path.write_bytes(encoded(image(zlib.crc32(path.name.encode()))))
    else:
        path.write_text(content)


@pytest.mark.parametrize("name", SETS)
def test_torchvision_has_the_loader(name):
    assert hasattr(datasets, SETS[name].loader)


def test_train_and_validation_of_dtd_are_joined(tmp_path):
    base = tmp_path / "dtd" / "dtd"
    for split in ("train", "val", "test"):
        names = [f"{label}/{label}_{split}.jpg" for label in ("banded", "dotted")]
        write(base / "labels" / f"{split}1.txt", "\n".join(names))
        for name in names:
            write(base / "images" / name)
    data = read_torchvision("dtd", tmp_path, download=False)
    assert data.classes == ("banded", "dotted")
    assert data.train.labels.tolist() == [0, 1, 0, 1]
    assert data.test.labels.tolist() == [0, 1]
    files = [base / "images" / f"{c}/{c}_{s}.jpg" for s in ("train", "val") for c in data.classes]
    for picture, file in zip(data.train.images, files, strict=True):
        assert encoded(picture.open().convert("RGB"), "PNG") == encoded(_opened(file), "PNG")
    loaded = load_data(Choice("dtd", image_size=6), tmp_path)
    assert loaded.train.images.shape == (4, 6, 6, 3)
    assert (tmp_path / "dtd.6.packed.safetensors").is_file()
    again = load_data(Choice("dtd", image_size=6), tmp_path / "dtd")  # the set's own folder
    assert torch.equal(again.train.images, loaded.train.images)
    assert load_data(Choice("dtd", "resized-crop-flip", 8), tmp_path).classes == data.classes


def _opened(file):
    from PIL import Image

    return Image.open(file).convert("RGB")


def test_aircraft_are_read_by_variant(tmp_path):
    base = tmp_path / "fgvc-aircraft-2013b" / "data"
    write(base / "variants.txt", "A 1\nB 2\n")
    for split, first in (("trainval", 0), ("test", 4)):
        lines = [f"{first + n:07d} {'A 1' if n % 2 else 'B 2'}" for n in range(3)]
        write(base / f"images_variant_{split}.txt", "\n".join(lines))
        for n in range(3):
            write(base / "images" / f"{first + n:07d}.jpg")
    data = read_torchvision("fgvc-aircraft", tmp_path, download=False)
    assert (data.classes, data.train.labels.tolist()) == (("A 1", "B 2"), [1, 0, 1])


def test_caltech_is_divided_the_same_way_every_time(tmp_path):
    base = tmp_path / "caltech101" / "101_ObjectCategories"
    for label, count in (("ant", 33), ("bee", 31), ("BACKGROUND_Google", 2)):
        for number in range(1, count + 1):
            write(base / label / f"image_{number:04d}.jpg")
    data, again = (read_torchvision("caltech101", tmp_path, download=False) for _ in range(2))
    assert data.classes == ("ant", "bee")
    assert torch.bincount(data.train.labels).tolist() == [30, 30]
    assert torch.bincount(data.test.labels).tolist() == [3, 1]
    names = [{p.name for p in split.images} for split in (data.train, data.test)]
    assert not names[0] & names[1]
    assert names[0] == {picture.name for picture in again.train.images}


def test_sun_does_not_depend_on_the_order_of_the_disk(tmp_path, monkeypatch):
    base = tmp_path / "SUN397"
    write(base / "ClassName.txt", "/a/abbey\n/b/bar\n")
    for label in ("a/abbey", "b/bar"):
        for number in range(110):
            write(base / label / f"sun_{number:03d}.jpg")

    def chosen():
        data = read_torchvision("sun397", tmp_path, download=False)
        splits = (data.train, data.test)
        assert [torch.bincount(split.labels).tolist() for split in splits] == [[50, 50]] * 2
        return [str(p.dataset._image_files[p.index]) for split in splits for p in split.images]

    expected = chosen()
    rglob = type(base).rglob
    monkeypatch.setattr(type(base), "rglob", lambda self, pattern: [*rglob(self, pattern)][::-1])
    assert chosen() == expected


class FakeCifar:
    """Stands in for the loader: the real one checks the sums of the real files."""

    asked: list = []  # noqa: RUF012

    def __init__(self, root, *, train, download):
        self.asked.append((root, train, download))
        self.targets = [0, 1, 1] if train else [1]
        self.classes = ["cat", "dog"]

    def __getitem__(self, index):
        return image(index, (32, 32)), self.targets[index]


def test_cifar_is_downloaded_only_if_wanted_and_packed_once(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "CIFAR10", FakeCifar)
    monkeypatch.setattr(FakeCifar, "asked", [])
    with pytest.raises(ValueError, match="download it"):
        load_data(Choice("cifar10"), tmp_path)
    assert FakeCifar.asked == []
    data = load_data(Choice("cifar10"), tmp_path, download=True)
    assert FakeCifar.asked == [(str(tmp_path), True, True), (str(tmp_path), False, True)]
    assert data.train.images.shape == (3, 32, 32, 3)
    assert bytes(data.train.images[2].flatten().tolist()) == image(2, (32, 32)).tobytes()
    assert data.train.labels.tolist() == [0, 1, 1]
    again = load_data(Choice("cifar10"), tmp_path, download=True)
    assert torch.equal(again.train.images, data.train.images)
    assert len(FakeCifar.asked) == 2


def test_incomplete_files_are_named(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(
        ValueError, match=r"'cifar10' cannot be read from .* not found or corrupted"
    ):
        load_data(Choice("cifar10"), tmp_path)


def test_a_failed_download_is_named(tmp_path, monkeypatch):
    def offline(*_args, **_kwargs):
        raise URLError("no network")

    monkeypatch.setattr(datasets, "CIFAR100", offline)
    with pytest.raises(ValueError, match=r"'cifar100' cannot be downloaded to .*no network"):
        load_data(Choice("cifar100"), tmp_path, download=True)
    assert not list(tmp_path.iterdir())


def test_cars_are_read_as_pairs(tmp_path, monkeypatch):
    fake = SimpleNamespace(_samples=[("a.jpg", 1), ("b.jpg", 0)], classes=["x", "y"])
    monkeypatch.setattr(datasets, "StanfordCars", lambda *_args, **_kwargs: fake)
    assert read_torchvision("stanford-cars", tmp_path, download=False).train.labels.tolist() == [
        1,
        0,
    ]


def test_flowers_without_class_names_are_numbered(tmp_path, monkeypatch):
    fake = SimpleNamespace(_labels=[1, 0, 2])
    monkeypatch.setattr(datasets, "Flowers102", lambda *_args, **_kwargs: fake)
    data = read_torchvision("flowers102", tmp_path, download=False)
    assert data.classes == ("0", "1", "2")
    assert len(data.train) == 6
