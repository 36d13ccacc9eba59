"""How good a model is at a language task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from torchcram.experiments.data.text.datasets import CONTEXT
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.metrics import binary_scores, exact_match, token_f1
from torchcram.experiments.tasks.score import Score
from torchcram.experiments.tasks.spans import best_spans
from torchcram.experiments.training.steps import autocast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from torchcram.experiments.data.text.batches import TextBatches
    from torchcram.experiments.data.text.datasets import Texts
    from torchcram.experiments.tasks.text_formats import Task


def text_score(
    model: nn.Module,
    batches: TextBatches,
    task: Task,
    *,
    device: torch.device,
    precision: str = "fp32",
    ranks: Ranks = SINGLE,
) -> Score:
    """Returns what a model, in eval mode, comes to on test batches.

    Args:
        model: on `device`.
        batches: those of this process where there are several.
        task: says which metrics.
        device: of the batches.
        precision: "fp32", or "bf16" for autocast on a GPU.
        ranks: Processes that share the work; rank 0 writes the files.
    """
    found = _scores(model, batches, device, precision)
    if task.sentences is None:
        values = _answers(found, batches.texts, ranks)
    else:
        values = _classes(found, batches.texts, task, ranks)
    others = {name: values[name] for name in task.others}
    value = values[task.metric]
    if value < 0:  # a correlation: worse than chance is as bad
        others[task.metric], value = value, 0.0
    return Score(value, task.metric, others or None)


Scored = tuple["Tensor", "Tensor", "Tensor"]  # which sequences, their inputs, their scores


def _scores(
    model: nn.Module, batches: TextBatches, device: torch.device, precision: str
) -> Iterator[Scored]:
    batches.start_epoch(0)
    for number in range(len(batches)):
        inputs, _ = batches.batch(number)
        with autocast(device, precision):
            scores = model(inputs)
        yield batches.places(number), inputs, scores


def _classes(found: Iterator[Scored], texts: Texts, task: Task, ranks: Ranks) -> dict[str, float]:
    classes = len(task.classes)
    counts = torch.zeros(classes * classes, dtype=torch.int64)
    for places, _, scores in found:
        pairs = texts.labels[places.cpu()] * classes + scores.argmax(1).cpu()
        counts += torch.bincount(pairs, minlength=len(counts))
    added = torch.tensor(ranks.all_reduce_sum(*counts.tolist())).long().view(classes, classes)
    return binary_scores(added.tolist())


def _answers(found: Iterator[Scored], texts: Texts, ranks: Ranks) -> dict[str, float]:
    sums = torch.zeros(len(texts), dtype=torch.float64)
    spans = torch.zeros(len(texts), 2, dtype=torch.int64)
    for places, inputs, scores in found:
        best, tokens = best_spans(scores, inputs[:, 1] >= CONTEXT)
        rows = places.cpu()
        # what cannot be added up is told apart by a sum that no pair of scores has
        sums[rows] = best.double().clamp(min=-1e30).cpu()
        spans[rows] = tokens.cpu()
    if ranks.world_size > 1:  # every sequence is one process's, and zero in all others
        sums = torch.tensor(ranks.all_reduce_sum(*sums.tolist()), dtype=torch.float64)
        spans = torch.tensor(ranks.all_reduce_sum(*spans.flatten().tolist())).long().view(-1, 2)
    return score_answers(texts, answers(texts, sums, spans))


def answers(texts: Texts, sums: Tensor, spans: Tensor) -> dict[int, str]:
    """Returns the answer to every question: the best one out of its windows.

    Args:
        texts: windows of questions.
        sums: (n,), the score of the best answer in each window.
        spans: (n, 2), its first and its last token.
    """
    assert texts.gold is not None  # noqa: S101
    gold, found = texts.gold, dict[int, str]()
    best: dict[int, float] = {}
    starts = texts.ends - texts.lengths
    begins = texts.offsets[starts + spans[:, 0], 0].tolist()
    ends = texts.offsets[starts + spans[:, 1], 1].tolist()
    for place, (question, value) in enumerate(
        zip(texts.examples.tolist(), sums.tolist(), strict=True)
    ):
        if question not in best or value > best[question]:
            best[question] = value
            context = gold.contexts[gold.context_of[question]]
            possible = value > -1e30
            found[question] = context[begins[place] : ends[place]] if possible else ""
    return found


def score_answers(texts: Texts, given: dict[int, str]) -> dict[str, float]:
    """Returns the means of F1 and exact match over the questions."""
    assert texts.gold is not None  # noqa: S101
    right = [(answer, texts.gold.answers[question]) for question, answer in given.items()]
    return {
        "F1": sum(token_f1(*pair) for pair in right) / len(right),
        "exact match": sum(exact_match(*pair) for pair in right) / len(right),
    }
