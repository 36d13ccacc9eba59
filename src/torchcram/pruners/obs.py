"""Second-order pruning: the optimal brain surgeon in blocks, as in WoodFisher and oBERT.

    F = lambda I + 1/m sum_k g_k g_k^T        one F for every block of B consecutive weights

The empirical Fisher matrix F is estimated from m gradients g_k, each of which is dropped as soon as
it has been added: rank-one updates of F, r at a time. The code stores F rather than its inverse
(float32, weights x B x 4 bytes) and factors it in float64, some blocks at a time, when it is used.
The result is the inverse that Sherman-Morrison-Woodbury updates from I / lambda would give. But
those updates subtract numbers near 1 / lambda = 1e7 from each other, and in float32 nothing of the
result is left once gradients exceed about 0.1.

Rounding in float32 makes F uncertain by less than 2 eps of its trace. In a block where lambda is
smaller than that bound (the trace is above 0.4 then), the bound takes the place of lambda.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.functional import pad

from torchcram.layers import like
from torchcram.messages import list_names
from torchcram.operators import NM, GlobalTopK, Sparsifier, UniformTopK
from torchcram.pruners.base import Pruner, require_damping

if TYPE_CHECKING:
    from torch import Tensor

    from torchcram.pruners.base import Calibration
    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class Obs(Pruner):
    """Drops the weights whose loss costs least to second order, and corrects the others for it.

    ::

        score_i = w_i^2 / (2 [F^-1]_ii)            the cost of dropping w_i alone
        dw = -F^-1[:,Q] (F^-1[Q,Q])^-1 w_Q         the correction once Q is dropped, in each block

    F is the empirical Fisher matrix at the current weights, in blocks (see `Fisher`). The pattern
    ranks by the root of the score. The correction is exact for all weights Q that a block drops
    together. A sum of corrections for single weights would ignore their interaction, and leave
    dropped weights away from zero.

    Attributes:
        pattern: Pattern of the weights to keep.
        gradients: Number m of gradients, each of one batch.
        block: Number B of consecutive weights whose interaction is considered.
        damping: Damping lambda.
        recomputations: Number of steps in which the sparsity rises; F is estimated before each.
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
        """Estimates F, drops weights and corrects the others, `recomputations` times."""
        masks: Masks = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}
        for pattern in steps(self.pattern, self.recomputations):
            fisher = Fisher(weights, block=self.block, damping=self.damping)
            add = partial(fisher.add, masks=masks)
            calibration.differentiate(weights, self.gradients, add)
            fisher.finish()
            masks = drop_(weights, fisher, pattern)
        return masks


MOST_STEPS = 1000


def steps(pattern: Sparsifier, count: int) -> list[Sparsifier]:
    """Returns the patterns on the way to `pattern`, in at most `count` steps.

    Every step drops the same share of the remaining weights: after step t of T a fraction k^(t/T)
    is kept. For N:M it is rounded to whole weights of a group, and no pattern occurs twice (3:4,
    then 2:4).

    Raises:
        ValueError: If `count` is too large, or no patterns on the way to `pattern` are known.
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


def drop_(weights: Weights, fisher: Fisher, pattern: Sparsifier) -> Masks:
    """Drops the weights with the lowest scores and corrects the others, in place.

    Args:
        weights: Weights to prune.
        fisher: Fisher matrix at these weights, finished.
        pattern: Pattern of the weights to keep.

    Returns:
        Masks of the weights that are kept.
    """
    masks = pattern.select(_scores(weights, fisher))
    for name, weight in weights.items():
        weight.copy_(fisher.remove(name, weight, masks[name]))
    return masks


def _scores(weights: Weights, fisher: Fisher) -> Weights:
    scores = {
        name: (weight / (2 * fisher.inverse_diagonal(name, weight)).sqrt()).to(
            torch.promote_types(weight.dtype, torch.float32)
        )
        for name, weight in weights.items()
    }
    return like(weights, scores)


CHUNK = 16  # r: gradients added at a time
AT_ONCE = 8192  # blocks factored at a time


class Fisher:
    """Fisher matrix F of every weight tensor, in blocks of consecutive weights in row-major order.

    A shorter last block is padded with weights whose gradient is zero.

    Args:
        weights: Weights that F belongs to; only their shapes, types and devices are used.
        block: Number B of weights in a block.
        damping: Damping lambda.
        chunk: Number r of gradients that are held until they are added; results do not depend on
            it.
    """

    def __init__(
        self, weights: Weights, *, block: int = 50, damping: float = 1e-7, chunk: int = CHUNK
    ) -> None:
        self.block, self.damping, self.chunk = block, damping, chunk
        self.count = 0  # m
        self._sums: dict[str, Tensor] = {}
        self._held: dict[str, Tensor] = {}
        for name, weight in weights.items():
            blocks = -(-weight.numel() // block)
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self._sums[name] = weight.new_zeros(blocks, block, block, dtype=dtype)
            self._held[name] = weight.new_zeros(chunk, blocks, block, dtype=dtype)

    @torch.no_grad()
    def add(
        self, gradients: Mapping[str, Tensor], masks: Mapping[str, Tensor] | None = None
    ) -> None:
        """Adds one gradient; weights that it omits have gradient zero.

        Args:
            gradients: Gradients by name.
            masks: Masks of the weights that are still there. The gradients of the others count as
                zero, so that F^-1 restricted to the weights still there is the inverse of F
                restricted to them.
        """
        slot = self.count % self.chunk
        for name, held in self._held.items():
            gradient = gradients.get(name)
            if gradient is None:
                held[slot].zero_()
                continue
            if masks is not None:
                gradient = gradient.masked_fill(masks[name].logical_not(), 0)
            held[slot].view(-1)[: gradient.numel()] = gradient.reshape(-1)
        self.count += 1
        if slot + 1 == self.chunk:
            self._add_held(self.chunk)

    def finish(self) -> None:
        """Adds the gradients that are still held, and frees their memory.

        Raises:
            ValueError: If there was no gradient, or a gradient was not finite.
        """
        if not self.count:
            raise ValueError("the Fisher matrix of no gradients at all is not defined")
        if self._held:
            self._add_held(self.count % self.chunk)
            self._held = {}
        diagonals = {name: total.diagonal(dim1=1, dim2=2) for name, total in self._sums.items()}
        if bad := [name for name, some in diagonals.items() if not bool(some.isfinite().all())]:
            raise ValueError(f"gradients are not finite in: {list_names(bad)}")

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that was added so far; the tensors are not copied."""
        waiting = self.count % self.chunk
        held = {name: held[:waiting] for name, held in self._held.items()}
        return {"count": self.count, "sums": dict(self._sums), "held": held}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of a Fisher matrix of the same weights, block and chunk.

        Raises:
            ValueError: If the weights or the blocks are others; nothing is changed then.
        """
        shapes = {name: total.shape for name, total in state["sums"].items()}
        if shapes != {name: total.shape for name, total in self._sums.items()}:
            raise ValueError(
                f"the Fisher matrix of the state belongs to other weights or has other blocks than "
                f"those of {self.block} weights"
            )
        self.count = int(state["count"])
        for name, total in self._sums.items():
            total.copy_(state["sums"][name])
        for name, held in state["held"].items():
            self._held[name][: len(held)].copy_(held)

    def _add_held(self, count: int) -> None:
        for name, held in self._held.items():
            some = held[:count]  # (r, blocks, B)
            self._sums[name].baddbmm_(some.permute(1, 2, 0), some.permute(1, 0, 2))

    @torch.no_grad()
    def inverse_diagonal(self, name: str, like: Tensor) -> Tensor:
        """Returns [F^-1]_ii for every weight, in the shape of `like`."""
        total = self._sums[name]
        diagonal = torch.empty(total.shape[:2], dtype=torch.float64, device=total.device)
        identity = torch.eye(self.block, dtype=torch.float64, device=total.device)
        for some in _ranges(len(total)):
            lower = torch.linalg.cholesky(self._damped(total[some]))  # F = L L^T
            inverse = torch.linalg.solve_triangular(lower, identity.expand_as(lower), upper=False)
            diagonal[some] = inverse.square().sum(1)  # F^-1 = L^-T L^-1
        return diagonal.view(-1)[: like.numel()].view(like.shape)

    @torch.no_grad()
    def remove(self, name: str, weight: Tensor, mask: Tensor) -> Tensor:
        """Returns `weight` with the weights zero that `mask` drops, and the others corrected.

            dw = argmin 1/2 dw^T F dw    where dw_Q = -w_Q for the dropped Q,
            so dw_R = F_RR^-1 F_RQ w_Q   for the rest R

        Q are all dropped weights of a block; dw equals -F^-1[:,Q] (F^-1[Q,Q])^-1 w_Q.
        """
        total = self._sums[name]
        values, kept = self._blocks(weight.double()), self._blocks(mask)
        for some in _ranges(len(total)):
            damped, w, rest = self._damped(total[some]), values[some], kept[some]
            pull = damped @ w.masked_fill(rest, 0).unsqueeze(-1)  # F[:,Q] w_Q
            both = rest.unsqueeze(1) & rest.unsqueeze(2)
            damped.masked_fill_(both.logical_not(), 0)  # F_RR, and the identity for Q
            damped.diagonal(dim1=1, dim2=2).masked_fill_(rest.logical_not(), 1)
            pull.masked_fill_(rest.logical_not().unsqueeze(-1), 0)
            step = torch.cholesky_solve(pull, torch.linalg.cholesky(damped)).squeeze(-1)
            values[some] = (w + step).masked_fill(rest.logical_not(), 0)
        return values.view(-1)[: weight.numel()].view(weight.shape).to(weight.dtype)

    def _damped(self, total: Tensor) -> Tensor:
        mean = total.double() / self.count  # (blocks, B, B)
        diagonal = mean.diagonal(dim1=1, dim2=2)
        bound = 2 * torch.finfo(total.dtype).eps * diagonal.sum(1, keepdim=True)
        diagonal += bound.clamp(min=self.damping)
        return mean

    def _blocks(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1)
        return pad(flat, (0, -flat.numel() % self.block)).view(-1, self.block).clone()


def _ranges(count: int) -> list[slice]:
    return [slice(start, start + AT_ONCE) for start in range(0, count, AT_ONCE)]
