"""Sections of a recipe that say which data to train on."""

from __future__ import annotations

from dataclasses import dataclass, field

from torchcram.experiments.data.images.resident import AUGMENTS, STREAMED
from torchcram.experiments.data.text.formats import TEXT_FORMATS
from torchcram.experiments.io.dataclass_io import UNLESS_DEFAULT, require, require_one_of


@dataclass(frozen=True)
class DataConfig:
    """Section `data`: the dataset.

    Attributes:
        name: Name of the dataset.
        augment: Augmentation of training images: "none"; "shift" by up to a pixel; "crop-flip", a
            random crop out of the image padded by an eighth, flipped or not; "resized-crop-flip",
            the usual one of ImageNet.
        image_size: Size that images are resized to; None leaves them as they are.
        color: Whether grey images get three equal channels, for models that take colour images.
            Images of class folders always have three channels.
    """

    name: str
    augment: str = "crop-flip"
    image_size: int | None = None
    color: bool = field(default=False, metadata=UNLESS_DEFAULT)

    def __post_init__(self) -> None:
        require(bool(self.name), "name", self.name, "the name of a dataset")
        require_one_of("augment", self.augment, AUGMENTS)
        size = self.image_size
        require(size is None or size >= 1, "image_size", size, "at least 1, or null")
        sized = size is not None or self.augment != STREAMED
        require(sized, "image_size", size, f"a size, as augment is {self.augment!r}")


@dataclass(frozen=True)
class TextConfig:
    """Section `text`: how texts become tokens; a recipe with it is about language.

    Attributes:
        task: Format of the dataset, which says the metric too.
        length: Greatest length of a sequence in tokens.
        stride: Number of tokens by which windows on a long paragraph overlap.
    """

    task: str
    length: int = 384
    stride: int = 128

    def __post_init__(self) -> None:
        require_one_of("task", self.task, TEXT_FORMATS)
        require(self.length >= 16, "length", self.length, "at least 16")
        fits = 0 <= self.stride <= self.length // 3
        require(fits, "stride", self.stride, f"from 0 to {self.length // 3}, a third of length")
