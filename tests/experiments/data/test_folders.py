import io
import os
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_trees import archive, archive_of, encoded, image, tree

from torchcram.experiments.data.images import pack
from torchcram.experiments.data.images.folders import (
    archives_fingerprint,
    find_archives,
    find_folder,
    folder_fingerprint,
    read_archives,
    read_folder,
)

JPEG = encoded(image(0))


def same(a, b):
    pairs = [(x, y) for x, y in ((a.train, b.train), (a.test, b.test))]
    facts = [(data.name, data.classes, data.mean, data.std) for data in (a, b)]
    return facts[0] == facts[1] and all(
        torch.equal(x.images, y.images) and torch.equal(x.labels, y.labels) for x, y in pairs
    )


def test_a_folder_is_read_as_torchvision_reads_it(tmp_path):
    datasets = pytest.importorskip("torchvision.datasets")
    root = tree(tmp_path, classes=("dog", "Cat", "9"))
    found = read_folder(root)
    assert (found.name, found.classes) == ("pets", ("9", "Cat", "dog"))
    for split, ours in (("train", found.train), ("test", found.test)):
        theirs = datasets.ImageFolder(root / split)
        assert [picture.name for picture in ours.images] == [path for path, _ in theirs.samples]
        assert ours.labels.tolist() == theirs.targets


def test_an_archive_is_the_same_as_its_folder(tmp_path):
    root = tree(tmp_path, classes=("dog", "cat", "bird"))
    # the archive's own order is another one
    parts = ["test/dog", "train/dog", "train/bird", "test/cat", "train/cat", "test/bird"]
    whole = archive(root, tmp_path / "a" / "pets.tar.xz", parts)
    assert same(pack(read_archives("pets", [whole])), pack(read_folder(root)))


def test_parts_of_an_archive_are_put_together(tmp_path):
    root = tree(tmp_path / "tree", splits=("train", "val"))
    for name, part in (("train-1", "train/dog"), ("train-2", "train/cat"), ("val", "val")):
        archive(root, tmp_path / f"pets-{name}.tar.xz", [part])
    archive(root, tmp_path / "pets-large-train-1.tar.xz", ["train"])  # another set's
    archive(root, tmp_path / "pets-notes.tar.xz", ["train"])
    found = find_archives("pets", tmp_path)
    assert [path.name for path in found] == [
        "pets-train-1.tar.xz", "pets-train-2.tar.xz", "pets-val.tar.xz",
    ]  # fmt: skip
    assert same(pack(read_archives("pets", found)), pack(read_folder(root)))
    whole = archive(root, tmp_path / "pets.tar.xz")
    assert find_archives("pets", tmp_path) == [whole]


def test_the_set_is_found_by_its_folder_or_the_one_above(tmp_path, monkeypatch):
    root = tree(tmp_path)
    assert find_folder("pets", tmp_path) == root
    assert find_folder("pets", root) == root
    assert find_folder("cars", root) is None
    assert find_folder("cars", tmp_path) is None
    monkeypatch.chdir(root)
    found = find_folder("pets", root.relative_to(root))
    assert found is not None
    assert read_folder(found).name == "pets"


def test_test_comes_before_val(tmp_path):
    root = tree(tmp_path, splits=("train", "val", "test"))
    assert all("/test/" in picture.name for picture in read_folder(root).test.images)
    found = read_archives("pets", [archive(root, tmp_path / "pets.tar.xz")])
    assert all("/test/" in picture.name for picture in found.test.images)


def test_other_files_are_passed_over(tmp_path):
    root = tree(tmp_path, count=2)
    for path in ("README", "train/labels.csv", "train/cat/notes.txt", "train/cat/._0000.jpg"):
        (root / path).write_text("no image")
    (root / "train" / ".hidden").mkdir()
    (root / "train" / ".hidden" / "a.jpg").write_bytes(JPEG)
    (root / "train" / "loose.jpg").write_bytes(JPEG)
    (root / "train" / "cat" / "more").mkdir()
    (root / "train" / "cat" / "more" / "a.JPEG").write_bytes(JPEG)
    folder = read_folder(root)
    packed = read_archives("pets", [archive(root, tmp_path / "pets.tar.xz")])
    assert len(folder.train) == len(packed.train) == 5
    assert folder.classes == packed.classes == ("cat", "dog")


def both(root, tmp_path):
    """Reads a set from its folder and from an archive of it."""
    whole = archive(root, tmp_path / "made" / "pets.tar.xz")
    return (lambda: read_folder(root)), (lambda: read_archives("pets", [whole]))


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_empty_class_folder_is_named(tmp_path, split):
    root = tree(tmp_path)
    (root / split / "bird").mkdir()
    (root / "train" / "bird").mkdir(exist_ok=True)
    if split == "test":
        (root / "train" / "bird" / "a.jpg").write_bytes(JPEG)
    for read in both(root, tmp_path):
        with pytest.raises(ValueError, match=f"class folder pets/{split}/bird has no images"):
            read()


def test_test_classes_that_are_not_trained_on_are_named(tmp_path):
    root = tree(tmp_path)
    for name in ("zebra", "ant"):
        (root / "test" / name).mkdir()
        (root / "test" / name / "a.jpg").write_bytes(JPEG)
    for read in both(root, tmp_path):
        with pytest.raises(ValueError, match=r"2 classes of pets/test are not in .*: ant, zebra"):
            read()


def test_a_class_may_be_missing_from_the_test(tmp_path):
    root = tree(tmp_path)
    (root / "train" / "ant").mkdir()
    (root / "train" / "ant" / "a.jpg").write_bytes(JPEG)
    for read in both(root, tmp_path):
        found = read()
        assert found.classes == ("ant", "cat", "dog")
        assert found.test.labels.tolist() == [1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("splits", [("train",), ("test",), ("train", "other")])
def test_a_missing_split_is_named(tmp_path, splits):
    root = tree(tmp_path, splits=splits)
    there = splits[0]
    for read in both(root, tmp_path):
        with pytest.raises(
            ValueError, match=f"pets/train and .* pets/test or pets/val; .*: {there}"
        ):
            read()


def test_an_archive_of_another_set_is_named(tmp_path):
    path = archive(tree(tmp_path, "cars"), tmp_path / "pets.tar.xz")
    with pytest.raises(ValueError, match=r"pets.tar.xz: dataset 'pets' needs .*: none"):
        read_archives("pets", [path])


def test_a_damaged_member_is_named(tmp_path):
    names = [f"pets/{split}/cat/{n}.jpg" for split in ("train", "test") for n in (1, 2)]
    contents = [JPEG, JPEG, JPEG[:100], JPEG]
    path = archive_of(tmp_path / "pets.tar.xz", zip(names, contents, strict=True))
    with pytest.raises(ValueError, match=r"pets.tar.xz: pets/test/cat/1.jpg is not a readable"):
        pack(read_archives("pets", [path]))


def test_a_member_twice_is_named(tmp_path):
    names = ["pets/train/cat/1.jpg", "pets/test/cat/1.jpg", "./pets/train/cat/1.jpg"]
    path = archive_of(tmp_path / "pets.tar.xz", [(name, JPEG) for name in names])
    with pytest.raises(ValueError, match=r"pets.tar.xz: ./pets/train/cat/1.jpg is there twice"):
        read_archives("pets", [path])


def test_a_link_in_an_archive_is_named(tmp_path):
    path = tmp_path / "pets.tar.xz"
    with tarfile.open(path, "w:xz") as tar:
        info = tarfile.TarInfo("pets/train/cat/1.jpg")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    with pytest.raises(ValueError, match=r"pets/train/cat/1.jpg is not a plain file"):
        read_archives("pets", [path])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_an_archive_cut_off_or_changed_anywhere_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    names = [f"pets/{split}/cat/{n}.jpg" for split in ("train", "test") for n in range(3)]
    path = archive_of(folder / "pets.tar.xz", [(name, JPEG) for name in names])
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        del content[place:]
    else:
        content[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"pets.tar.xz is damaged or no archive"):
        read_archives("pets", [path])


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.lists(
                st.sampled_from(["pets", "train", "test", "cat", "..", ".", "a.jpg", "", "/"]),
                min_size=1, max_size=6,
            ),
            st.booleans(),
        ),
        max_size=6, unique_by=lambda entry: tuple(entry[0]),
    )
)  # fmt: skip
def test_any_member_names_give_a_set_or_a_named_error(tmp_path_factory, entries):
    path = tmp_path_factory.mktemp("names") / "pets.tar.xz"
    members = [("/".join(parts) or "x", JPEG if file else None) for parts, file in entries]
    archive_of(path, members)
    try:
        found = read_archives("pets", [path])
    except ValueError as error:
        named = "pets.tar.xz" in str(error)
    else:
        named = len(found.train) > 0 < len(found.test)
    assert named
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_fingerprints_change_with_the_files(tmp_path):
    root = tree(tmp_path)
    path = archive(root, tmp_path / "pets.tar.xz")
    prints = [folder_fingerprint(root), archives_fingerprint([path])]
    assert prints == [folder_fingerprint(root), archives_fingerprint([path])]
    (root / "train" / "cat" / "0000.jpg").rename(root / "train" / "cat" / "x.jpg")
    renamed = folder_fingerprint(root)
    (root / "train" / "cat" / "x.jpg").write_bytes(b"short")
    assert len({prints[0], renamed, folder_fingerprint(root)}) == 3
    path.write_bytes(path.read_bytes() + b"\0")
    assert archives_fingerprint([path]) != prints[1]


def test_fingerprints_change_with_files_of_the_same_size(tmp_path):
    root = tree(tmp_path)
    path = archive(root, tmp_path / "pets.tar.xz")
    one = root / "train" / "cat" / "0000.jpg"
    for file, fingerprint in (
        (one, lambda: folder_fingerprint(root)),
        (path, lambda: archives_fingerprint([path])),
    ):
        before, when = fingerprint(), file.stat().st_mtime
        file.write_bytes(bytes(file.stat().st_size))
        os.utime(file, (when + 1, when + 1))
        assert fingerprint() != before


def test_image_bytes_survive_the_archive(tmp_path):
    root = tree(tmp_path)
    found = read_archives("pets", [archive(root, tmp_path / "pets.tar.xz")])
    expected = [picture.open().tobytes() for picture in read_folder(root).train.images]
    assert [picture.open().tobytes() for picture in found.train.images] == expected
    assert isinstance(found.train.images[0].open().fp, io.BytesIO)
