"""CrAM, the compression-aware minimizer (Peste et al., ICLR 2023), around any base optimizer.

w    weights                        C    compression operator, M its mask
g    grad L(w)                      w~   the perturbed, compressed point
rho  length of the ascent           g~   what the base optimizer steps with
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcram.batchnorm import frozen_statistics
from torchcram.layers import LayerWeights, Masks, Weights, local_weights
from torchcram.operators import Operator, as_operator
from torchcram.optim import gradients
from torchcram.optim.agreement import require_alike
from torchcram.optim.backup import Backup
from torchcram.optim.checks import (
    check_arguments,
    check_ascent,
    check_rule,
    check_still_scaled,
)
from torchcram.optim.draws import Draw, Draws
from torchcram.optim.finite import FiniteGuard, all_finite, carry_overflow, raise_not_finite
from torchcram.optim.gradients import Gradients
from torchcram.optim.randomness import Randomness
from torchcram.optim.rules import CRAM_PLUS, Pass, UpdateRule
from torchcram.optim.spread import Spread
from torchcram.optim.wrapper import Wrapper
from torchcram.weights import mask_gradients_, weights_in

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer


class CrAM(Wrapper):
    """g~ = M * grad L(C(w + rho g)) + g, handed to `base`; other rules by `rule`.

    Args:
        model: the model that is trained.
        base: the optimizer that takes the steps. It keeps its own state; learning-rate schedulers
            go on this wrapper.
        operators: one, or several out of which every step draws one uniformly ("-Multi"); text such
            as "global:0.9" will do. SAM needs none.
        rho: length of the ascent; a parameter group of `base` with its own "rho" overrides it
            (except where that is an option of `base` itself, as with Adadelta).
        rule: one of `SAM`, `CRAM`, `CRAM_PLUS`, `C_SAM`, `TOPK`, `TOPK_PLUS`.
        sparse_gradients: multiply by M where the rule says so; False never does.
        normalize: ascend along g/|g|; None leaves it to the rule.
        max_ascent_norm: ascend along g scaled down to at most this norm, as `clip_grad_norm_` does;
            what CrAM+ adds is g as it is. None leaves g alone.
        mask_interval: compute the mask of an operator anew only at every so many of its uses.
        base_step_probability: the probability of a plain step of `base` instead.
        weights: what to compress; by default all `compressible_weights(model)`.
        seed: of the draws, which have a generator of their own.
        replay_randomness: let all passes of `step(closure)` see the same random numbers (dropout).
        check_finite: raise FloatingPointError at a NaN or infinite gradient instead of stepping.
            The host waits for the device to know, except with a fused base optimizer on CUDA: that
            one skips the step on the device, and the error comes with the next step. A GradScaler,
            where there is one, decides instead. A `step()` that no compressed pass went before is
            not checked.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operators: Operator | str | Sequence[Operator | str] | None,
        *,
        rho: float = 0.05,
        rule: UpdateRule = CRAM_PLUS,
        sparse_gradients: bool = True,
        normalize: bool | None = None,
        max_ascent_norm: float | None = None,
        mask_interval: int = 1,
        base_step_probability: float = 0.0,
        weights: Weights | None = None,
        seed: int = 0,
        replay_randomness: bool = False,
        check_finite: bool = True,
    ) -> None:
        check_rule(rule)
        given = (operators,) if isinstance(operators, (Operator, str)) else operators or ()
        drawn = tuple(as_operator(operator) for operator in given)
        self._spread = Spread(model)
        check_arguments(model, base, drawn, rule, rho, mask_interval, base_step_probability)
        super().__init__(base)
        self.model = model
        self.weights = self._choose(weights) if rule.compresses else LayerWeights({})
        self.rho = rho
        self.rule = rule
        self.sparse_gradients = sparse_gradients
        self.normalize = rule.normalize if normalize is None else normalize
        check_ascent(max_ascent_norm, rule, normalize=self.normalize)
        self.max_ascent_norm = max_ascent_norm
        self.base_step_probability = base_step_probability
        self.replay_randomness = replay_randomness
        self.check_finite = check_finite
        self._draws = Draws(drawn if rule.compresses else (), mask_interval, seed)
        self._draw = Draw()  # what this step is
        self._guard = FiniteGuard(base, self._spread, self._draws.forget_all)
        self._backup = Backup(self._spread)
        self._pending: list[Pass | None] = []  # passes left in this step; None: a plain one
        self._inside = False  # a compressed pass
        require_alike(self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Takes one step and returns the loss at w.

        Args:
            closure: clears the gradients, computes the loss, calls backward and returns the loss;
                called once at w and once per pass of the rule (C-SAM has two, all others one). None
                takes a step of `base` with the gradients as they are: g~ after `compressed()`,
                otherwise a plain step.
        """
        self._require_outside()
        if closure is None:
            self._require_no_pass_left()
            return self._guard.step()
        closure = torch.enable_grad()(closure)
        self._pending = []
        before = self._randomness()
        loss = closure()  # g
        for _ in self.rule.passes:
            with self.compressed() as needed:
                if needed:
                    if before is not None:
                        before.replay()
                    closure()  # grad L(w~)
        self._guard.step()  # w <- w - lr g~
        return loss

    @contextmanager
    def compressed(self, *, grad_scaler: GradScaler | None = None) -> Iterator[bool]:
        """Moves the weights to w~ for a `with` block; after it they are w and `.grad` holds g~.

        On entry `.grad` must hold g. Inside, run backward on the same data, in as many
        micro-batches as g was made of; running statistics stand still. Whatever happens inside, w
        comes back bit for bit; after an exception `.grad` is g. The block is to be entered once per
        pass of the rule: once, for C-SAM twice.

        Args:
            grad_scaler: the scaler that scaled the losses, if any. g~ stays scaled for its `step`,
                which also skips the step if either pass overflowed.

        Yields:
            False in a plain base step (`base_step_probability`): what is run inside does not count.
        """
        self._require_outside()
        check_still_scaled(self, grad_scaler)
        by_group = gradients.take_gradients(self.param_groups)
        g = [pair for group in by_group for pair in group]
        masks = None
        self._inside = True
        try:
            one = self._next_pass()
            self._backup.save(self._moved_by(one))  # w
            if one is not None and one.ascend:
                self._ascend_(by_group, grad_scaler)  # w + rho g
            if one is not None and one.compress:
                masks = self._compress_()  # C(w + rho g)
            self._forget_copies()  # of w
            with frozen_statistics(self.model):  # at w~
                yield one is not None
            self._require_gradients(one)
        except BaseException:
            self._spread.recover()
            self._abandon(g)
            raise
        finally:
            self._backup.restore()  # w
            self._inside = False
            self._forget_copies()  # of w~
        self._pending.pop(0)
        self._combine(one, g, masks)  # g~ = M * grad L(w~) + g
        self._check_finite(one, g, grad_scaler)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """What steps draw from."""
        return self._draws.operators

    @property
    def operator(self) -> Operator | None:
        """The operator drawn last; None after a plain step and for SAM."""
        return self._draw.operator

    def _next_pass(self) -> Pass | None:
        """Returns the pass that comes next; a step begins with drawing what it is to be."""
        if not self._pending:
            self._draw = self._draws.draw(self.base_step_probability)
            self._pending = [None if self._draw.plain else one for one in self.rule.passes]
        return self._pending[0]

    def _moved_by(self, one: Pass | None) -> list[Tensor]:
        ascending = self._parameters() if one is not None and one.ascend else []
        compressed = self.weights.values() if one is not None and one.compress else ()
        return list({id(p): p for p in (*ascending, *compressed)}.values())

    def _ascend_(self, g: list[Gradients], scaler: GradScaler | None) -> None:
        """Moves w to w + rho g, or to w + rho g/|g|; a loss scale in g does not count."""
        found = [pair for group in g for pair in group]
        unit: float | Tensor = 1.0
        if self.normalize:
            unit = gradients.one_over(self._spread.norm(found))
        elif scaler is not None and scaler.is_enabled():
            unit = 1 / scaler.scale(torch.ones((), device=found[0][1].device))
        if self.max_ascent_norm is not None:
            unit = unit * gradients.clipping(self._spread.norm(found) * unit, self.max_ascent_norm)
        for group, pairs in zip(self.param_groups, g, strict=True):
            w = self._spread.here([parameter for parameter, _ in pairs])
            along = self._spread.here([gradient for _, gradient in pairs])
            gradients.add_scaled_(w, along, self._rho_of(group) * unit)

    def _choose(self, weights: Weights | None) -> LayerWeights:
        """Returns what to compress, by default all that can be."""
        return weights_in(self.model, weights)

    def _compress_(self) -> Masks | None:
        """Compresses the weights by what this step has drawn."""
        here = local_weights(self.weights)
        return self._draws.compress_(self._draw, here, at=len(self._pending))

    def _combine(self, one: Pass | None, g: Gradients, masks: Masks | None) -> None:
        """Leaves M * grad L(w~) in `.grad`, plus g if the rule says so; g in a plain step."""
        if one is None:
            self.zero_grad()
            gradients.put_gradients(g)
            return
        if one.mask and self.sparse_gradients and masks is not None:
            mask_gradients_(self.weights, masks)
        if one.plus:
            gradients.add_gradients(g, self._spread)

    def _check_finite(self, one: Pass | None, g: Gradients, scaler: GradScaler | None) -> None:
        """Refuses gradients that are not finite, or leaves it to the scaler, which sees `.grad`."""
        self._guard.forget_pending()
        scaled = scaler is not None and scaler.is_enabled()
        if not scaled and not self.check_finite:
            return
        left = gradients.gradients_of(self._parameters())
        hidden = [] if one is None or one.plus else g  # where g~ does not hold g
        if scaled:
            carry_overflow(hidden, into=left, spread=self._spread)
            if self._draws.mask_interval > 1 and not all_finite(g, self._spread):
                self._draws.forget(self.operator)
        elif not self._guard.admits(hidden + left):
            self._abandon(left)
            raise_not_finite(hidden + left, self.model, self._spread)

    def _abandon(self, found: Gradients) -> None:
        """Ends a step half-way: no pass is left, no mask of it is kept."""
        self._pending = []
        self._guard.forget_pending()
        self._draws.forget(self.operator)
        self.zero_grad()
        gradients.put_gradients(found)

    def _forget_copies(self) -> None:
        """Drops what autocast and FSDP have made of the weights."""
        torch.clear_autocast_cache()
        self._spread.reshard()

    def _require_no_pass_left(self) -> None:
        if self._pending:
            passes = len(self.rule.passes)
            raise RuntimeError(
                f"{self.rule.name} enters compressed() {passes} times before a step; "
                f"{passes - len(self._pending)} so far"
            )

    def _require_outside(self) -> None:
        if self._inside:
            raise RuntimeError("the weights are at the compressed point: leave compressed() first")

    def _require_gradients(self, one: Pass | None) -> None:
        if one is not None and all(p.grad is None for p in self._parameters()):
            raise RuntimeError("there is no gradient at the compressed point: run backward inside")

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _rho_of(self, group: dict[str, Any]) -> float:
        return float(self.rho if "rho" in self.base.defaults else group.get("rho", self.rho))

    def _randomness(self) -> Randomness | None:
        devices = (parameter.device for parameter in self._parameters())
        return Randomness(devices) if self.replay_randomness else None

    def _extra_state(self) -> dict[str, Any]:
        return {"cram": self._draws.state_dict()}

    def _load_extra_state(self, state: dict[str, Any]) -> None:
        if "cram" in state:
            self._draws.load_state_dict(state["cram"], local_weights(self.weights))
        self._pending = []
        self._guard.reset()

    def __getstate__(self) -> dict[str, Any]:
        guard = FiniteGuard(self.base, self._spread, self._draws.forget_all)
        scratch = {"_backup": Backup(self._spread), "_guard": guard, "_pending": []}
        return {**super().__getstate__(), **scratch, "_inside": False}

    def __repr__(self) -> str:
        operators = ", ".join(map(str, self.operators))
        return f"CrAM({self.rule.name}, [{operators}], rho={self.rho}, base={self.base!r})"
