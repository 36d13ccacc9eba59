"""Question answering by spans of a paragraph, as in SQuAD: loss, answers, F1, exact match."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchcram.experiments.data.text.datasets import CONTEXT
from torchcram.experiments.ranks import SINGLE, Ranks
from torchcram.experiments.tasks.base import Score
from torchcram.experiments.tasks.text import TextTask, named_score, outputs_of
from torchcram.passes import eval_mode

if TYPE_CHECKING:
    from torch import nn

    from torchcram.experiments.data.text.batches import TextBatches
    from torchcram.experiments.data.text.datasets import Texts, TextSet

BEST = 20  # number of first tokens, and of last tokens, that are paired
LONGEST = 30  # greatest number of tokens in an answer
IMPOSSIBLE = -1e30  # sum of scores of a window without a possible answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)  # only ASCII, as in SQuAD


@dataclass(frozen=True)
class QuestionAnswering(TextTask):
    """Questions whose answers are spans of a paragraph, scored by F1 and exact match."""

    def loss(self, outputs: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
        """Returns the cross-entropy of the first and of the last token, the mean of both."""
        return span_loss(outputs, labels, smoothing)

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
        """Returns F1, with exact match beside it."""
        texts = batches.texts
        sums = torch.zeros(len(texts), dtype=torch.float64)
        spans = torch.zeros(len(texts), 2, dtype=torch.int64)
        with eval_mode(model):
            for index, inputs, scores in outputs_of(model, batches, device, precision):
                best, tokens = best_spans(scores, inputs[:, 1] >= CONTEXT)
                rows = index.cpu()
                sums[rows] = best.double().clamp(min=IMPOSSIBLE).cpu()
                spans[rows] = tokens.cpu()
        if ranks.world_size > 1:  # every sequence is scored on one rank, and zero on all others
            sums = torch.tensor(ranks.all_reduce_sum(*sums.tolist()), dtype=torch.float64)
            spans = torch.tensor(ranks.all_reduce_sum(*spans.flatten().tolist())).long().view(-1, 2)
        return named_score(score_answers(texts, answers(texts, sums, spans)), data.format)


def best_spans(
    scores: Tensor, allowed: Tensor, *, best: int = BEST, longest: int = LONGEST
) -> tuple[Tensor, Tensor]:
    """Pairs the best first tokens with the best last ones; returns the best pair that is possible.

    A pair is possible if the last token is not before the first, and not too far behind it. Scores
    that are not a number count as the worst.

    Args:
        scores: Scores of each token to be the first and to be the last one, (n, t, 2).
        allowed: Whether a token may be in an answer, (n, t).
        best: Number of first tokens, and of last tokens, that are paired.
        longest: Greatest number of tokens in an answer.

    Returns:
        Sums of both scores, (n,), -inf where no pair is possible; indices of both tokens, (n, 2).
    """
    low = float("-inf")
    masked = scores.float().nan_to_num(nan=low, neginf=low).masked_fill(~allowed.unsqueeze(-1), low)
    top = masked.topk(min(best, masked.shape[1]), dim=1)  # (n, best, 2)
    sums = top.values[:, :, None, 0] + top.values[:, None, :, 1]  # (n, first, last)
    tokens = top.indices[:, None, :, 1] - top.indices[:, :, None, 0] + 1
    sums = sums.masked_fill((tokens < 1) | (tokens > longest), low)
    value, pair = sums.flatten(1).max(dim=1)
    count = top.indices.shape[1]
    rows = torch.arange(len(pair), device=pair.device)
    first = top.indices[rows, pair // count, 0]
    last = top.indices[rows, pair % count, 1]
    return value, torch.stack((first, last), dim=1)


def span_loss(scores: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Returns the mean of the cross-entropies of the first and of the last token.

    Label smoothing is spread over the tokens without padding, whose scores are -inf, so that the
    loss does not depend on the padding.

    Args:
        scores: Scores of each token to be the first and to be the last one, (n, t, 2).
        labels: First and last token of the answer, (n, 2).
        smoothing: Label smoothing, from 0 to below 1.
    """
    present = scores.isneginf().logical_not()
    log = scores.float().log_softmax(dim=1)
    right = log.gather(1, labels.unsqueeze(1)).mean()
    if not smoothing:
        return -right
    even = torch.where(present, log, 0).sum(1) / present.sum(1)
    return -((1 - smoothing) * right + smoothing * even.mean())


def answers(texts: Texts, sums: Tensor, spans: Tensor) -> dict[int, str]:
    """Returns the answer to every question: the best one out of its windows.

    Args:
        texts: Windows of questions.
        sums: Score of the best answer in each window, (n,).
        spans: First and last token of that answer, (n, 2).
    """
    assert texts.references is not None  # noqa: S101
    references, chosen = texts.references, dict[int, str]()
    best: dict[int, float] = {}
    starts = texts.ends - texts.lengths
    begins = texts.offsets[starts + spans[:, 0], 0].tolist()
    ends = texts.offsets[starts + spans[:, 1], 1].tolist()
    for window, (question, value) in enumerate(
        zip(texts.examples.tolist(), sums.tolist(), strict=True)
    ):
        if question not in best or value > best[question]:
            best[question] = value
            context = references.contexts[references.context_of[question]]
            possible = value > IMPOSSIBLE
            chosen[question] = context[begins[window] : ends[window]] if possible else ""
    return chosen


def score_answers(texts: Texts, answered: dict[int, str]) -> dict[str, float]:
    """Returns the means of F1 and exact match over the questions."""
    assert texts.references is not None  # noqa: S101
    right = [(answer, texts.references.answers[question]) for question, answer in answered.items()]
    return {
        "F1": sum(token_f1(*pair) for pair in right) / len(right),
        "exact match": sum(exact_match(*pair) for pair in right) / len(right),
    }


def normalised(answer: str) -> str:
    """Returns an answer in lower case without punctuation, articles and needless blanks."""
    bare = answer.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """Returns 1 if the normalised answer is one of the normalised right ones, else 0."""
    return float(normalised(answer) in map(normalised, right))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """Returns 2 p r / (p + r) over the words that two normalised answers share.

    The right answer that gives the most counts. Without a shared word the score is 0, even if both
    answers are empty, as in SQuAD.
    """
    words = normalised(answer).split()
    return max((_f1(words, normalised(text).split()) for text in right), default=0.0)


def _f1(words: list[str], right: list[str]) -> float:
    same = sum((Counter(words) & Counter(right)).values())
    return 2 * same / (len(words) + len(right)) if same else 0.0
