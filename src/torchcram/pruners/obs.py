"""Second-order pruning: oBERT, WoodFisher, the optimal brain surgeon in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch

from torchcram.layers import like
from torchcram.operators import NM, GlobalTopK, Sparsifier, UniformTopK
from torchcram.pruners.base import Pruner, require_damping
from torchcram.pruners.fisher import Fisher

if TYPE_CHECKING:
    from torchcram.pruners.calibration import Calibration
    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class Obs(Pruner):
    """Drops the weights whose loss costs least to second order, and moves the others to make up.

    ::

        score_i = w_i^2 / (2 [F^-1]_ii)            the cost of dropping w_i alone
        dw = -F^-1[:,Q] (F^-1[Q,Q])^-1 w_Q         once Q is dropped, in each block

    F is the empirical Fisher matrix at the current weights, in blocks (see `Fisher`). The pattern
    ranks by the root of the score. The update is the exact one for all that a block drops, not the
    sum of one update for each: those ignore each other, and leave dropped weights away from zero.

    Attributes:
        pattern: what may be dropped together.
        gradients: m, each of them of one batch.
        block: B, the consecutive weights whose interaction is looked at.
        damping: lambda.
        recomputations: in how many steps the sparsity rises, F being estimated anew before each.
    """

    kind: ClassVar[str] = "obs"
    letters: ClassVar[Mapping[str, str]] = {
        "m": "gradients",
        "b": "block",
        "d": "damping",
        "r": "recomputations",
    }
    gradients: int = 1024
    block: int = 50
    damping: float = 1e-7
    recomputations: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("gradients", "block", "recomputations"):
            value = getattr(self, option)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Obs: {option} is {value!r}, allowed are integers from 1")
        require_damping(self, self.damping)
        steps(self.pattern, self.recomputations)

    def prune_(self, weights: Weights, calibration: Calibration) -> Masks:
        """Estimates F, drops, makes up; `recomputations` times."""
        masks: Masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}
        for pattern in steps(self.pattern, self.recomputations):
            fisher = Fisher(weights, block=self.block, damping=self.damping)
            add = partial(fisher.add, masks=masks)
            calibration.differentiate(weights, self.gradients, add)
            fisher.finish()
            masks = pattern.select(_scores(weights, fisher))
            for name, weight in weights.items():
                weight.copy_(fisher.remove(name, weight, masks[name]))
        return masks


MOST_STEPS = 1000


def steps(pattern: Sparsifier, count: int) -> list[Sparsifier]:
    """Returns the patterns on the way to `pattern`, in at most `count` steps.

    Every step drops the same share of what is there: after step t of T a fraction k^(t/T) is kept.
    N:M has few levels: the same, rounded to whole weights of a group and no level twice (3:4 and
    then 2:4).

    Raises:
        ValueError: for more steps than make sense, or a pattern without others on the way to it.
    """
    if count > MOST_STEPS:
        raise ValueError(
            f"Obs: recomputations is {count}, allowed are integers from 1 to {MOST_STEPS}"
        )
    shares = [(step + 1) / count for step in range(count - 1)]
    if isinstance(pattern, (GlobalTopK, UniformTopK)):
        kept = 1 - pattern.level
        earlier: list[Sparsifier] = [replace(pattern, sparsity=1 - kept**t) for t in shares]
        return [*earlier, pattern] if pattern.level else [pattern]
    if isinstance(pattern, NM):
        ratio = pattern.keep / pattern.group
        levels = [max(round(pattern.group * ratio**t), pattern.keep) for t in shares]
        between = [k for k in dict.fromkeys(levels) if pattern.keep < k < pattern.group]
        return [*(NM(k, pattern.group) for k in between), pattern]
    if count > 1:
        raise ValueError(
            f"Obs: no pattern on the way to {pattern} is known: recomputations must be 1"
        )
    return [pattern]


def _scores(weights: Weights, fisher: Fisher) -> Weights:
    scores = {
        name: (weight / (2 * fisher.inverse_diagonal(name, weight)).sqrt()).to(
            torch.promote_types(weight.dtype, torch.float32)
        )
        for name, weight in weights.items()
    }
    return like(weights, scores)
