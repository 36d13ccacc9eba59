"""Real inputs out of the test split, for models to be timed on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.experiments.recipe import Recipe
    from torchcram.experiments.tasks import Dataset


def example_batch(recipe: Recipe, data: Dataset, size: int) -> Tensor:
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
    return recipe.build_task().example(data, size)
