"""A compressed model that learns from the dense one it was made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchcram.experiments.structure import require


@dataclass(frozen=True)
class DistillConfig:
    """What the scores of the dense model count beside the labels; only in fine-tuning.

    Attributes:
        weight: their part of the loss; the labels have the rest.
        temperature: scores are divided by it before they are compared.
    """

    weight: float = 0.9
    temperature: float = 2.0

    def __post_init__(self) -> None:
        require(0 < self.weight <= 1, "weight", self.weight, "above 0 and at most 1")
        require(self.temperature > 0, "temperature", self.temperature, "above 0")


def distillation_loss(scores: Tensor, wanted: Tensor, temperature: float) -> Tensor:
    """Kullback-Leibler divergence of scores from those of another model, the mean over a batch.

    It is multiplied by the square of the temperature, so that gradients keep their size. Padding,
    at -inf, counts for nothing.

    Args:
        scores: (n, classes), or (n, t, 2) of first and last tokens, the mean of both.
        wanted: the same of the other model.
        temperature: of both.
    """
    log = (scores.float() / temperature).log_softmax(dim=1)
    target = (wanted.float() / temperature).log_softmax(dim=1)
    apart = torch.where(target.isneginf(), 0, target.exp() * (target - log))
    return temperature**2 * apart.sum(dim=1).mean()
