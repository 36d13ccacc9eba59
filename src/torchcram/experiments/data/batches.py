"""Batches of either kind of data set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from torchcram.experiments.data.augment import STREAMED
from torchcram.experiments.data.images import DataSet, Images
from torchcram.experiments.data.pictures import Pictures, PictureSet
from torchcram.experiments.data.resident import ResidentBatches
from torchcram.experiments.data.seeds import mixed, seeded
from torchcram.experiments.data.stream import StreamBatches


def make_batches(
    data: DataSet | PictureSet,
    *,
    train: bool,
    batch_size: int,
    augment: str,
    device: torch.device | str,
    seed: int,
    image_size: int | None = None,
    workers: int | None = None,
) -> ResidentBatches | StreamBatches:
    """Returns the batches of one split: resident if the images are decoded, else streamed.

    Args:
        data: what `load_data` returned.
        train: the training split, shuffled and augmented; else the test split, as it is.
        batch_size: images of a batch.
        augment: of the training images.
        device: where the batches go.
        seed: of order and augmentation.
        image_size: of streamed images; resident ones have their size already.
        workers: of streamed images.
    """
    return _batches(
        data.train if train else data.test,
        train=train,
        batch_size=batch_size,
        augment=augment,
        mean=data.mean,
        std=data.std,
        device=device,
        seed=seed,
        image_size=image_size,
        workers=workers,
    )


def calibration_batches(
    images: Images | Pictures,
    samples: int,
    batch_size: int,
    *,
    augment: str,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    device: torch.device | str,
    seed: int,
    image_size: int | None = None,
    workers: int | None = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented training batches of equal size for batch-norm tuning.

    Only the chosen images go to the device.

    Args:
        images: of the training split.
        samples: how many images to choose, all if there are fewer; the last few are left out where
            batches would not be equal.
        batch_size: at most.
        augment: as in training.
        mean: per channel; black is 0, white 1.
        std: likewise.
        device: where the batches go.
        seed: of the choice and the augmentation.
        image_size: of streamed images.
        workers: of streamed images.
    """
    if samples < 1 or batch_size < 1:
        raise ValueError(f"{samples} samples in batches of {batch_size}: both are at least 1")
    order = torch.randperm(len(images), generator=seeded(seed, "calibration"))
    chosen = images.take(order[:samples])
    steps = -(-len(chosen) // batch_size)
    return _batches(
        chosen,
        train=True,
        batch_size=len(chosen) // steps,
        augment=augment,
        mean=mean,
        std=std,
        device=device,
        seed=mixed(seed, "calibration"),
        image_size=image_size,
        workers=workers,
    ).epoch(0)


def _batches(
    split: Images | Pictures,
    *,
    train: bool,
    batch_size: int,
    augment: str,
    mean: Sequence[float] | Tensor,
    std: Sequence[float] | Tensor,
    device: torch.device | str,
    seed: int,
    image_size: int | None,
    workers: int | None,
) -> ResidentBatches | StreamBatches:
    if isinstance(split, Images):
        return ResidentBatches(
            split,
            batch_size=batch_size,
            augment=augment,
            mean=mean,
            std=std,
            device=device,
            seed=seed,
            train=train,
        )
    if image_size is None:
        raise ValueError(f"images that are streamed (augment {STREAMED!r}) need image_size")
    return StreamBatches(
        split,
        batch_size=batch_size,
        augment=augment,
        image_size=image_size,
        mean=mean,
        std=std,
        device=device,
        seed=seed,
        train=train,
        workers=workers,
    )
