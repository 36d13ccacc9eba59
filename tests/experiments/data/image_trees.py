"""Small trees of image files, and archives of them."""

import io
import tarfile
from dataclasses import dataclass

import torch
from PIL import Image


@dataclass(frozen=True)
class Choice:
    name: str
    augment: str = "crop-flip"
    image_size: int | None = None
    color: bool = False


def image(seed, size=(10, 8), mode="RGB"):
    """A picture of noise; `size` is width and height."""
    values = torch.randint(
        256, (size[1] * size[0] * 3,), generator=torch.Generator().manual_seed(seed)
    )
    return Image.frombytes("RGB", size, bytes(values.tolist())).convert(mode)


def encoded(picture, form="JPEG"):
    out = io.BytesIO()
    picture.save(out, form)
    return out.getvalue()


def tree(
    folder, name="pets", *, splits=("train", "test"), classes=("cat", "dog"), count=3, size=(10, 8)
):
    """Writes `count` images for every split and class; returns the dataset's folder."""
    seed = 0
    for split in splits:
        for label in classes:
            where = folder / name / split / label
            where.mkdir(parents=True)
            for number in range(count):
                seed += 1
                (where / f"{number:04d}.jpg").write_bytes(encoded(image(seed, size)))
    return folder / name


def archive(root, target, parts=("",)):
    """Puts `root`, or only parts of it such as "train/cat", into a .tar.xz; returns its path."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz") as tar:
        for part in parts:
            tar.add(root / part, arcname=f"{root.name}/{part}".rstrip("/"))
    return target


def archive_of(target, members):
    """Writes an archive from a list of names and contents; None is a folder."""
    with tarfile.open(target, "w:xz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type = tarfile.DIRTYPE
            else:
                info.size = len(content)
            tar.addfile(info, io.BytesIO(content or b""))
    return target
