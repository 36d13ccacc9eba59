"""Data: by name from files, packed, and as batches on a device."""

from torchcram.experiments.data.images.augment import AUGMENTS
from torchcram.experiments.data.images.batches import calibration_batches, make_batches
from torchcram.experiments.data.images.images import DataSet, Images, hold_out
from torchcram.experiments.data.images.packed import PackedError, pack, read_packed, write_packed
from torchcram.experiments.data.images.pictures import Pictures, PictureSet
from torchcram.experiments.data.images.resident import NO_LABEL, ResidentBatches
from torchcram.experiments.data.images.sources import dataset_names, load_data
from torchcram.experiments.data.images.stream import StreamBatches
from torchcram.experiments.data.parts import WHOLE, Part
from torchcram.experiments.data.text.texts import TextSet

AnyData = DataSet | PictureSet | TextSet

__all__ = [
    "AUGMENTS",
    "NO_LABEL",
    "WHOLE",
    "AnyData",
    "DataSet",
    "Images",
    "PackedError",
    "Part",
    "PictureSet",
    "Pictures",
    "ResidentBatches",
    "StreamBatches",
    "calibration_batches",
    "dataset_names",
    "hold_out",
    "load_data",
    "make_batches",
    "pack",
    "read_packed",
    "write_packed",
]
