"""Batches of an image dataset, decoded or encoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from torchcram.experiments.data.images.datasets import EncodedDataset, ImageDataset
from torchcram.experiments.data.images.resident import STREAMED, ResidentBatches
from torchcram.experiments.data.images.stream import StreamBatches
from torchcram.experiments.ranks import WHOLE, Shard
from torchcram.experiments.seeds import mixed, seeded


def make_batches(
    data: ImageDataset | EncodedDataset,
    *,
    train: bool,
    batch_size: int,
    augment: str,
    device: torch.device | str,
    seed: int,
    image_size: int | None = None,
    workers: int | None = None,
    shard: Shard = WHOLE,
) -> ResidentBatches | StreamBatches:
    """Returns the batches of one split: resident if the images are decoded, else streamed.

    Args:
        data: Dataset that `load_data` returned.
        train: Whether to take the training split, shuffled and augmented, or the test split.
        batch_size: Number of images in a batch.
        augment: Augmentation of the training images.
        device: Device that the batches are put on.
        seed: Seed of order and augmentation.
        image_size: Size of streamed images; resident ones have theirs already.
        workers: Number of processes that decode streamed images.
        shard: Rows of every training batch, or whole test batches, that this rank takes.
    """
    if isinstance(data, ImageDataset):
        return ResidentBatches(
            data.train if train else data.test,
            batch_size=batch_size,
            augment=augment,
            mean=data.mean,
            std=data.std,
            device=device,
            seed=seed,
            train=train,
            shard=shard,
        )
    if image_size is None:
        raise ValueError(f"streamed images (augment {STREAMED!r}) need image_size")
    return StreamBatches(
        data.train if train else data.test,
        batch_size=batch_size,
        augment=augment,
        image_size=image_size,
        mean=data.mean,
        std=data.std,
        device=device,
        seed=seed,
        train=train,
        workers=workers,
        shard=shard,
    )


def calibration_batches(
    data: ImageDataset | EncodedDataset,
    samples: int,
    batch_size: int,
    *,
    augment: str,
    device: torch.device | str,
    seed: int,
    image_size: int | None = None,
    workers: int | None = 0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields augmented training batches of equal size for batch-norm tuning.

    Only the chosen images are copied to the device.

    Args:
        data: Dataset whose training images are chosen from.
        samples: Number of images to choose, all if there are fewer; a few less if that makes the
            batches equal.
        batch_size: Greatest number of images in a batch.
        augment: Augmentation, as in training.
        device: Device that the batches are put on.
        seed: Seed of the choice and of the augmentation.
        image_size: Size of streamed images.
        workers: Number of processes that decode streamed images.
    """
    if samples < 1 or batch_size < 1:
        raise ValueError(f"{samples} samples in batches of {batch_size}: both must be at least 1")
    order = torch.randperm(len(data.train), generator=seeded(seed, "calibration"))[:samples]
    steps = -(-len(order) // batch_size)
    chosen: ImageDataset | EncodedDataset = replace(data, train=data.train.take(order))  # type: ignore[arg-type]
    return make_batches(
        chosen,
        train=True,
        batch_size=len(order) // steps,
        augment=augment,
        device=device,
        seed=mixed(seed, "calibration"),
        image_size=image_size,
        workers=workers,
    ).epoch(0)
