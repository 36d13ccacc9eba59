"""Classification of single sentences or of pairs, as in GLUE."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.base import Score
from torchcram.experiments.tasks.text import TextTask, named_score, outputs_of
from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.data.text.batches import TextBatches
    from torchcram.experiments.data.text.datasets import TextSet


@dataclass(frozen=True)
class SentenceClassification(TextTask):
    """Classification of sentences or pairs, scored by the metrics of the GLUE dataset."""

    @torch.no_grad()
    def score(
        self,
        model: nn.Module,
        data: TextSet,
        batches: TextBatches,
        *,
        device: torch.device,
        precision: str = "fp32",
        ranks: Ranks = SINGLE,
    ) -> Score:
        """Returns the metrics of the dataset out of the confusion matrix."""
        classes = len(data.classes)
        counts = torch.zeros(classes * classes, dtype=torch.int64)
        with eval_mode(model):
            for index, _, scores in outputs_of(model, batches, device, precision):
                pairs = batches.texts.labels[index.cpu()] * classes + scores.argmax(1).cpu()
                counts += torch.bincount(pairs, minlength=len(counts))
        sums = torch.tensor(ranks.all_reduce_sum(*counts.tolist())).long().view(classes, classes)
        return named_score(binary_scores(sums.tolist()), data.format)


def binary_scores(counts: Sequence[Sequence[int]]) -> dict[str, float]:
    """Returns accuracy; for two classes also F1 of the second and the Matthews correlation.

    If a denominator is 0, as with a single predicted class, F1 or the correlation is 0.

    Args:
        counts: Confusion matrix, `counts[label][prediction]`.
    """
    total = sum(map(sum, counts))
    scores = {"accuracy": sum(row[label] for label, row in enumerate(counts)) / total}
    if len(counts) == 2:
        (tn, fp), (fn, tp) = counts
        scores["F1"] = 2 * tp / (2 * tp + fp + fn) if tp else 0.0
        scale = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
        scores["Matthews correlation"] = (tp * tn - fp * fn) / scale if scale else 0.0
    return scores
