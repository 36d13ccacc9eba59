"""Image datasets: loaded by name, decoded into one file, and as batches on a device."""

from torchcram.experiments.data.images.batches import calibration_batches, make_batches
from torchcram.experiments.data.images.datasets import (
    EncodedDataset,
    EncodedImages,
    ImageDataset,
    Images,
    hold_out,
)
from torchcram.experiments.data.images.loading import dataset_names, load_data
from torchcram.experiments.data.images.packed import pack, read_packed, write_packed
from torchcram.experiments.data.images.resident import AUGMENTS, NO_LABEL, ResidentBatches
from torchcram.experiments.data.images.stream import StreamBatches
from torchcram.experiments.ranks import WHOLE, Shard

__all__ = [
    "AUGMENTS",
    "NO_LABEL",
    "WHOLE",
    "EncodedDataset",
    "EncodedImages",
    "ImageDataset",
    "Images",
    "ResidentBatches",
    "Shard",
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
