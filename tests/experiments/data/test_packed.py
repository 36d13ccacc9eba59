import io
import stat

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_trees import encoded, image
from PIL import Image
from safetensors.torch import save_file

from torchcram.experiments.data.images import (
    EncodedDataset,
    EncodedImages,
    ImageDataset,
    Images,
    pack,
    read_packed,
    write_packed,
)
from torchcram.experiments.data.images.datasets import ArchiveMember
from torchcram.experiments.io.cache import CacheError


def some(count, height=4, width=5, channels=3):
    images = torch.randint(256, (count, height, width, channels), dtype=torch.uint8)
    return Images(images, torch.arange(count) % 2)


def written(path, data=None, **changes):
    data = data or ImageDataset("pets", some(6), some(3), ("cat", "dog"))
    write_packed(data, path, **({"image_size": None, "source": "here"} | changes))
    return data


def equal(a, b):
    tensors = [(x.images, y.images) for x, y in ((a.train, b.train), (a.test, b.test))]
    tensors += [(x.labels, y.labels) for x, y in ((a.train, b.train), (a.test, b.test))]
    facts = [(d.name, d.classes, d.mean, d.std) for d in (a, b)]
    return facts[0] == facts[1] and all(torch.equal(x, y) for x, y in tensors)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.sampled_from([1, 3]),
    st.lists(st.text(max_size=8), min_size=2, max_size=4),
)  # fmt: skip
def test_reading_gives_what_was_written(tmp_path_factory, count, height, width, channels, classes):
    path = tmp_path_factory.mktemp("packed") / "new" / "pets.safetensors"
    splits = (some(count, height, width, channels) for _ in range(2))
    data = written(path, ImageDataset("pets", *splits, tuple(classes)))
    assert equal(read_packed(path, name="pets", image_size=None, source="here"), data)
    assert equal(read_packed(path, name="pets", image_size=None), data)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_mapped_file_may_be_replaced(tmp_path):
    path = tmp_path / "pets.safetensors"
    data = written(path)
    mapped = read_packed(path, name="pets", image_size=None)
    written(path, ImageDataset("pets", some(60), some(30), ("cat", "dog")))
    assert equal(mapped, data)


def test_others_may_read_the_file_where_they_may_read_the_folder(tmp_path):
    for mode in (0o755, 0o700):
        tmp_path.chmod(mode)
        written(tmp_path / "pets.safetensors")
        assert stat.S_IMODE((tmp_path / "pets.safetensors").stat().st_mode) == mode & 0o644


def test_a_file_cut_off_anywhere_is_refused_by_name(tmp_path):
    path = tmp_path / "pets.safetensors"
    written(path)
    content = path.read_bytes()
    for length in [*range(0, len(content), 7), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CacheError, match=r"pets.safetensors is not the packed dataset"):
            read_packed(path, name="pets", image_size=None)


@settings(deadline=None, max_examples=50)
@given(st.binary(max_size=300))
def test_other_bytes_are_refused(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("packed") / "pets.safetensors"
    path.write_bytes(content)
    with pytest.raises(CacheError, match=r"pets.safetensors"):
        read_packed(path, name="pets", image_size=None)


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"other": "x"},
        {"torchcram": "{"},
        {"torchcram": "[]"},
        {"torchcram": "{}"},
        {"torchcram": "1"},
    ],
)
def test_other_safetensors_files_are_refused(tmp_path, metadata):
    path = tmp_path / "pets.safetensors"
    save_file({"train.images": torch.zeros(2)}, path, metadata)
    with pytest.raises(CacheError, match="is not the packed dataset 'pets'"):
        read_packed(path, name="pets", image_size=None)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"name": "cars"}, "its name is 'pets', expected 'cars'"),
        ({"image_size": 32}, "its image_size is None, expected 32"),
        ({"source": "there"}, "its source is 'here', expected 'there'"),
    ],
)
def test_another_data_set_is_refused(tmp_path, wanted, message):
    written(tmp_path / "file")
    with pytest.raises(CacheError, match=message):
        read_packed(tmp_path / "file", **({"name": "pets", "image_size": None} | wanted))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CacheError, match="nowhere"):
        read_packed(tmp_path / "nowhere", name="pets", image_size=None)


def test_a_failed_write_leaves_the_folder_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "pets.safetensors"
    written(path)
    before = path.read_bytes()

    def full(_tensors, file, _metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space left"):
        written(path, ImageDataset("pets", some(7), some(7), ("cat", "dog")))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == before


def pictures(*contents):
    members = tuple(
        ArchiveMember(f"a.tar.xz: {number}.jpg", c) for number, c in enumerate(contents)
    )
    return EncodedImages(members, torch.zeros(len(members), dtype=torch.int64))


def packed(*contents, image_size=None):
    split = pictures(*contents)
    return pack(EncodedDataset("pets", split, split, ("cat",)), image_size)


def test_images_are_decoded_as_pillow_does_at_any_number():
    contents = [encoded(image(seed)) for seed in range(150)]
    data = packed(*contents)
    assert data.train.images.shape == (150, 8, 10, 3)
    for got, content in zip(data.train.images, contents, strict=True):
        assert bytes(got.flatten().tolist()) == Image.open(io.BytesIO(content)).tobytes()


@pytest.mark.parametrize(
    ("form", "mode"), [("PNG", "L"), ("PNG", "RGBA"), ("JPEG", "CMYK"), ("PNG", "P")]
)
def test_other_colours_become_rgb(form, mode):
    picture = image(1, mode=mode)
    data = packed(encoded(picture, form))
    assert data.train.images.shape == (1, 8, 10, 3)
    if form == "PNG":
        assert bytes(data.test.images.flatten().tolist()) == picture.convert("RGB").tobytes()


def test_images_of_several_sizes_need_an_image_size():
    contents = [encoded(image(1)), encoded(image(2, (12, 8)))]
    with pytest.raises(ValueError, match=r"1.jpg is 12x8, but .*0.jpg is 10x8: .* image_size"):
        packed(*contents)
    assert packed(*contents, image_size=6).train.images.shape == (2, 6, 6, 3)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 30))
def test_any_size_becomes_the_image_size(width, height, size):
    assert packed(encoded(image(0, (width, height))), image_size=size).train.images.shape[1:3] == (
        size,
        size,
    )


def test_the_centre_is_cut_out_after_scaling_the_short_side():
    wide = Image.new("RGB", (40, 20), (255, 0, 0))
    wide.paste((0, 255, 0), (10, 0, 30, 20))
    data = packed(encoded(wide, "PNG"), image_size=20)
    assert data.train.images.view(-1, 3).unique(dim=0).tolist() == [[0, 255, 0]]
    small = packed(encoded(wide, "PNG"), image_size=10).train.images[0, 5]
    assert small[2:8].tolist() == [[0, 255, 0]] * 6


def test_images_of_the_right_size_are_not_touched():
    content = encoded(image(3, (9, 9)))
    assert torch.equal(packed(content, image_size=9).train.images, packed(content).train.images)


@pytest.mark.parametrize(
    "damage", [b"", b"no image", encoded(image(1))[:-200], encoded(image(1), "PNG")[:60]]
)
def test_a_damaged_image_is_named(damage):
    with pytest.raises(ValueError, match=r"a.tar.xz: 1.jpg is not a readable image"):
        packed(encoded(image(0)), damage)
