"""l0 regularization by hard-concrete gates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torchcram.baselines.base import STATE, Baseline
from torchcram.baselines.penalty import AdaptivePenalty
from torchcram.baselines.schedule import SparsitySchedule, Steps
from torchcram.baselines.scores import (
    as_magnitudes,
    gradients_of,
    in_layers,
    per_weight,
    set_magnitudes_,
    shortfall,
    sigmoid_slopes,
)
from torchcram.weights import apply_masks_

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from torchcram.operators import Operator
    from torchcram.weights import Masks, Weights

BETA = 2 / 3
"""Temperature of the gates."""

GAMMA, ZETA = -0.1, 1.1
"""Interval that gates are stretched to, before they are clipped to [0, 1]."""

LARGEST = math.log(100)
"""Bound of |log a|, within which the sigmoid has a gradient."""

CLOSED = math.log(-GAMMA / ZETA)
"""Value of log a up to which the gate without noise is closed."""


class L0(Baseline):
    """w~ = z w with random gates z in [0, 1], and a penalty on the number of open ones.

        z        = clip(y (zeta - gamma) + gamma, 0, 1)
        y        = sigmoid((log u - log(1 - u) + log a) / beta),    u uniform in (0, 1)
        loss     = L(w~) + penalty mean(P(z > 0))
        P(z > 0) = sigmoid(log a - beta log(-gamma / zeta))

    Louizos, Welling & Kingma, "Learning sparse neural networks through l0 regularization", ICLR
    2018. Every weight has a gate of its own, which learns log a; the mean is over all weights, so
    that the penalty does not depend on the size of the model. The gradient of a gate is about as
    small as one over the number of weights: adaptive optimizers make up for it, others need a
    `gate_lr` that does. At the end gates are set to z = clip(sigmoid(log a) (zeta - gamma) + gamma,
    0, 1), and the Top-K of |z w| remain. If fewer gates are open, log a rises by one amount for
    all, in each layer where the target is one of each layer.

    Which sparsity a penalty leads to is not known in advance. With `end`, it adapts itself to the
    sparsity s of all gates together, without noise, which is to grow by the cubic schedule s(t)::

        e      = s(t) - s
        v     <- v + 100 e / end
        factor = sinh(v + 10 e),    by which the penalty is multiplied

    Args:
        model: Model to train.
        base: Optimizer that takes the steps, also those of the gates.
        operator: Target, such as "global:0.9".
        penalty: Factor of the penalty; with `end` its unit, for which 1 is a good value.
        drop_rate: Rate at which gates are closed in the beginning; log a is drawn around
            log((1 - drop_rate) / drop_rate), with a standard deviation of 0.01.
        gate_lr: Learning rate of log a; by default that of the weights.
        end: Step at which the sparsity, which grows by a cubic schedule, is to be that of the
            target; by default the penalty is not adapted.
        seed: Seed of the random numbers, the same on every rank.
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Raises:
        ValueError: If an argument is out of range, or the model is sharded.
    """

    moves = True

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        penalty: float = 1.0,
        drop_rate: float = 0.3,
        gate_lr: float | None = None,
        end: Steps | None = None,
        seed: int = 0,
        weights: Weights | None = None,
    ) -> None:
        if not penalty >= 0:
            raise ValueError(f"penalty must be at least 0, got {penalty}")
        if not 0 < drop_rate < 1:
            raise ValueError(f"drop_rate must be in (0, 1), got {drop_rate}")
        if gate_lr is not None and not gate_lr >= 0:
            raise ValueError(f"gate_lr must be None or at least 0, got {gate_lr}")
        if end is not None and end < 1:
            raise ValueError(f"end must be None or at least 1, got {end}")
        if end is not None and penalty == 0:
            raise ValueError("penalty must be greater than 0 to be adapted, got 0")
        super().__init__(model, base, operator, weights=weights)
        self.require_whole()
        self.penalty = penalty
        self._adaptive: AdaptivePenalty | None = None
        if end is not None:
            self._adaptive = AdaptivePenalty(SparsitySchedule(end), self.operator, self.weights)
        devices = dict.fromkeys(weight.device for weight in self.weights.values())
        self._generators = {each: torch.Generator(each).manual_seed(seed) for each in devices}
        self._before_draw: list[Tensor] = []  # states of the generators
        self._log_a = per_weight(self.weights)
        self._gates = per_weight(self.weights)  # z of this step
        mean = math.log((1 - drop_rate) / drop_rate)
        for log_a in self._log_a.values():
            log_a.normal_(std=0.01, generator=self._generators[log_a.device]).add_(mean)
        self.train_also("gates", self._log_a, lr=gate_lr, weight_decay=0.0)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns log a of the gates."""
        return {"log_a": self._log_a}

    def kept_tensors(self) -> list[Tensor]:
        """Returns the masks, log a, and what an adaptive penalty depends on."""
        return [*super().kept_tensors(), *([] if self._adaptive is None else [self._adaptive.v])]

    def check_length(self, steps: int) -> None:
        """Raises ValueError if the sparsity is to be reached after the end of the training."""
        if self._adaptive is not None:
            self._adaptive.schedule.check_length(steps)

    def set_step_numbers_(self) -> None:
        """Sets the sparsity that the penalty follows."""
        if self._adaptive is not None:
            self._adaptive.set_step_(self.steps)

    def update_masks(self) -> None:
        """Draws the gates z of a step; M marks the open ones."""
        self._before_draw = [generator.get_state() for generator in self._generators.values()]
        gates = list(self._gates.values())
        for gate in gates:
            gate.uniform_(generator=self._generators[gate.device]).logit_()
        torch._foreach_add_(gates, list(self._log_a.values()))
        torch._foreach_div_(gates, BETA)
        torch._foreach_sigmoid_(gates)  # y
        torch._foreach_mul_(gates, ZETA - GAMMA)
        torch._foreach_add_(gates, GAMMA)
        torch._foreach_clamp_min_(gates, 0)
        torch._foreach_clamp_max_(gates, 1)
        for name, gate in self._gates.items():
            torch.gt(gate, 0, out=self.masks[name])

    def move_(self) -> None:
        """Moves to w~ = z w."""
        torch._foreach_mul_(list(self.weights.values()), list(self._gates.values()))
        apply_masks_(self.weights, self.masks)

    def test_point_(self) -> None:
        """Moves to z w with gates without noise."""
        for name, weight in self.weights.items():
            weight.mul_(_gate(self._log_a[name]))

    def combine_(self) -> None:
        """Derives the gradients of w and of log a from the gradient at w~, with the penalty."""
        count = sum(weight.numel() for weight in self.weights.values())
        opened = torch._foreach_sub(list(self._log_a.values()), BETA * CLOSED)
        torch._foreach_sigmoid_(opened)  # P(z > 0)
        pulls = dict(zip(self._log_a, sigmoid_slopes(opened), strict=True))
        del opened  # memory
        torch._foreach_mul_(list(pulls.values()), self.penalty / count)
        if self._adaptive is not None:
            factor = self._adaptive.follow_(1 - self._open_count() / count)
            torch._foreach_mul_(list(pulls.values()), [factor.to(p) for p in pulls.values()])
        for name, log_a in self._log_a.items():
            log_a.grad = pulls[name]
        gradients = gradients_of(self.weights)
        if not gradients:
            return
        gates = [self._gates[name] for name in gradients]
        y = torch._foreach_sub(gates, GAMMA)
        torch._foreach_div_(y, ZETA - GAMMA)
        slopes = sigmoid_slopes(y)  # of z
        torch._foreach_mul_(slopes, (ZETA - GAMMA) / BETA)
        torch._foreach_copy_(y, gates)
        torch._foreach_frac_(y)
        torch._foreach_sign_(y)
        torch._foreach_mul_(slopes, y)  # 0 where z is clipped
        del y
        torch._foreach_mul_(slopes, list(gradients.values()))
        torch._foreach_mul_(slopes, [self.weights[name] for name in gradients])
        torch._foreach_add_([pulls[name] for name in gradients], slopes)
        torch._foreach_mul_(list(gradients.values()), gates)

    def project_(self) -> None:
        """Keeps log a within the bounds."""
        torch._foreach_clamp_min_(list(self._log_a.values()), -LARGEST)
        torch._foreach_clamp_max_(list(self._log_a.values()), LARGEST)

    def final_masks(self) -> Masks:
        """Returns the masks of the largest |z w|, then of the largest log a among closed gates."""
        return self.operator.select(as_magnitudes(self.weights, self._final_scores()))

    def final_weights_(self) -> None:
        """Moves to z w for good, without noise; closed gates of kept weights are opened."""
        rise = shortfall(self.operator, self.weights, self._final_scores(), self.masks)
        for name, log_a in self._log_a.items():
            raised = in_layers(self.weights, name, log_a) + rise[name]
            weight = self.weights[name]
            set_magnitudes_(weight, weight.abs() * _gate(raised).flatten(0, 1))

    def _open_count(self) -> Tensor:
        """Returns the number of gates that are open without noise, in few kernels."""
        gates = torch._foreach_sub(list(self._log_a.values()), CLOSED)
        torch._foreach_clamp_min_(gates, 0)
        torch._foreach_sign_(gates)
        first = next(iter(self._log_a.values()))
        return torch.stack([n.to(first.device) for n in torch._foreach_norm(gates, 1)]).sum()

    def _final_scores(self) -> dict[str, Tensor]:
        """Returns |z w| where the gate without noise is open, how far it is from that elsewhere."""
        scores = {}
        for name, log_a in self._log_a.items():
            magnitude = self.weights[name].detach().abs() * _gate(log_a)
            scores[name] = torch.where(log_a > CLOSED, magnitude, log_a - CLOSED)
        return scores

    def _extra_state(self) -> dict[str, Any]:
        state = super()._extra_state()
        now = [generator.get_state() for generator in self._generators.values()]
        # gates that a step has drawn are drawn again
        state[STATE]["generators"] = self._before_draw if self._begun else now
        if self._adaptive is not None:
            state[STATE]["v"] = self._adaptive.v.clone()
        return state

    def _read_extra_state(self, state: dict[str, Any]) -> Callable[[], None]:
        load_rest = super()._read_extra_state(state)
        if STATE not in state:
            return load_rest
        v = state[STATE].get("v")
        if (v is None) != (self._adaptive is None):
            theirs, ours = ("fixed", "adaptive") if v is None else ("adaptive", "fixed")
            raise ValueError(f"the state has {theirs} penalties, and this optimizer {ours} ones")
        saved = [each.cpu() for each in state[STATE]["generators"]]
        try:
            for device, generator_state in zip(self._generators, saved, strict=True):
                torch.Generator(device).set_state(generator_state)
        except (RuntimeError, ValueError, TypeError) as error:
            raise ValueError(
                f"the state has random generators of other devices than "
                f"{', '.join(map(str, self._generators))}"
            ) from error

        def load() -> None:
            load_rest()
            if self._adaptive is not None:
                self._adaptive.v.copy_(v)
            for generator, generator_state in zip(self._generators.values(), saved, strict=True):
                generator.set_state(generator_state)
            if self._begun:
                with torch.no_grad():
                    self.update_masks()

        return load


def _gate(log_a: Tensor) -> Tensor:
    """Returns the gate without noise."""
    return log_a.sigmoid().mul_(ZETA - GAMMA).add_(GAMMA).clamp_(0, 1)
