"""From scores of tokens to answers."""

from __future__ import annotations

import torch
from torch import Tensor

BEST = 20  # first and last tokens that are paired
LONGEST = 30  # tokens of an answer


def best_spans(
    scores: Tensor, allowed: Tensor, *, best: int = BEST, longest: int = LONGEST
) -> tuple[Tensor, Tensor]:
    """Pairs the best first tokens with the best last ones; returns the best pair that is possible.

    A pair is possible if the last token is not before the first, and not too far behind it. Scores
    that are not a number count as the worst.

    Args:
        scores: (n, t, 2), of a token to be the first and the last one.
        allowed: (n, t), which tokens may be in an answer.
        best: how many of the first and of the last ones are paired.
        longest: tokens of an answer.

    Returns:
        The sums of both scores, (n,), -inf where no pair is possible; the places of both tokens,
        (n, 2).
    """
    low = float("-inf")
    masked = scores.float().nan_to_num(nan=low, neginf=low).masked_fill(~allowed.unsqueeze(-1), low)
    top = masked.topk(min(best, masked.shape[1]), dim=1)  # (n, best, 2)
    sums = top.values[:, :, None, 0] + top.values[:, None, :, 1]  # (n, first, last)
    tokens = top.indices[:, None, :, 1] - top.indices[:, :, None, 0] + 1
    sums = sums.masked_fill((tokens < 1) | (tokens > longest), low)
    found, place = sums.flatten(1).max(dim=1)
    count = top.indices.shape[1]
    rows = torch.arange(len(place), device=place.device)
    first = top.indices[rows, place // count, 0]
    last = top.indices[rows, place % count, 1]
    return found, torch.stack((first, last), dim=1)


def span_loss(scores: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Cross-entropy of the first and of the last token, the mean of both.

    Label smoothing takes its part from all tokens that are there alike: padding, at -inf, is none,
    so that the loss does not depend on it.

    Args:
        scores: (n, t, 2).
        labels: (n, 2), the tokens of the answer.
        smoothing: from 0 to below 1.
    """
    present = scores.isneginf().logical_not()
    log = scores.float().log_softmax(dim=1)
    right = log.gather(1, labels.unsqueeze(1)).mean()
    if not smoothing:
        return -right
    even = torch.where(present, log, 0).sum(1) / present.sum(1)
    return -((1 - smoothing) * right + smoothing * even.mean())
