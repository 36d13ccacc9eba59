"""Real inputs out of the test split, for models to be timed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from torchcram.experiments.data.images import make_batches
from torchcram.experiments.data.text.batches import TextBatches
from torchcram.experiments.data.text.datasets import TextSet

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.experiments.data.images import AnyData
    from torchcram.experiments.recipe import Recipe


def example_batch(recipe: Recipe, data: AnyData, size: int) -> Tensor:
    """Returns inputs as the model gets them, on the CPU.

    Images are the first ones. Texts are those whose length is in the middle of all, without more
    padding than the longest of them needs.

    Args:
        recipe: how they are read.
        data: whose test split they are from.
        size: how many.

    Raises:
        ValueError: if there are not as many.
    """
    if not 1 <= size <= len(data.test):
        unit = "sequences" if isinstance(data, TextSet) else "images"
        raise ValueError(f"batch {size}: {data.name!r} has 1 to {len(data.test)} test {unit}")
    if isinstance(data, TextSet):
        lengths = data.test.lengths
        order = lengths.argsort(stable=True)
        begin = (len(order) - size) // 2
        chosen = order[begin : begin + size]
        batches = TextBatches(data.test, batch_size=size, device="cpu", seed=0, train=False)
        return batches.at(chosen, int(lengths[chosen].max()))[0]
    batches_of_images = make_batches(
        data,
        train=False,
        batch_size=size,
        augment=recipe.data.augment,
        device=torch.device("cpu"),
        seed=0,
        image_size=recipe.data.image_size,
        workers=0,
    )
    images, _ = next(iter(batches_of_images.epoch(0)))
    return images.contiguous()
