"""CrAM, the compression-aware minimizer (Peste et al., ICLR 2023), around any base optimizer.

w    weights                        C    compression operator, M its mask
g    grad L(w)                      w~   the perturbed, compressed point
rho  length of the ascent           g~   what the base optimizer steps with
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer

from torchcram.batchnorm import frozen_statistics
from torchcram.operators import Operator
from torchcram.optim.checks import check_arguments
from torchcram.optim.draws import Draws
from torchcram.optim.rules import CRAM_PLUS, Pass, UpdateRule
from torchcram.optim.scratch import Backup, add_scaled_
from torchcram.weights import Masks, Weights, compressible_weights, zero_unmasked_

if TYPE_CHECKING:
    from torch.amp import GradScaler

Gradients = dict[Tensor, Tensor]  # by parameter


class CrAM(Optimizer):
    """g~ = M * grad L(C(w + rho g)) + g, handed to `base`; other rules by `rule`.

    Args:
        model: the model that is trained.
        base: the optimizer that takes the steps. It keeps its own state; learning-rate schedulers
            go on this wrapper.
        operators: one, or several out of which every step draws one uniformly ("-Multi"). SAM needs
            none.
        rho: length of the ascent; a parameter group of `base` with its own "rho" overrides it.
        rule: one of `SAM`, `CRAM`, `CRAM_PLUS`, `C_SAM`, `TOPK`, `TOPK_PLUS`.
        sparse_gradients: multiply by M where the rule says so; False never does.
        normalize: ascend along g/|g|; None leaves it to the rule.
        mask_interval: compute the mask of an operator anew only at every so many of its uses.
        base_step_probability: the probability of a plain step of `base` instead.
        weights: what to compress; by default all `compressible_weights(model)`.
        seed: of the draws, which have a generator of their own.
        replay_randomness: let all passes of `step(closure)` see the same random numbers (dropout).
        check_finite: raise FloatingPointError at a NaN or infinite gradient instead of stepping. It
            waits for the device once a step, as a GradScaler does; where there is one, it decides
            and nothing is checked here.

    Attributes:
        operator: the operator drawn last; None after a plain step and for SAM.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operators: Operator | Sequence[Operator],
        *,
        rho: float = 0.05,
        rule: UpdateRule = CRAM_PLUS,
        sparse_gradients: bool = True,
        normalize: bool | None = None,
        mask_interval: int = 1,
        base_step_probability: float = 0.0,
        weights: Weights | None = None,
        seed: int = 0,
        replay_randomness: bool = False,
        check_finite: bool = True,
    ) -> None:
        operators = (operators,) if isinstance(operators, Operator) else tuple(operators)
        if weights is None:
            weights = compressible_weights(model) if rule.compresses else {}
        check_arguments(
            model, base, operators, weights, rule, rho, mask_interval, base_step_probability
        )
        self.model = model
        self.base = base
        self.weights = weights
        self.rule = rule
        self.sparse_gradients = sparse_gradients
        self.normalize = rule.normalize if normalize is None else normalize
        self.base_step_probability = base_step_probability
        self.replay_randomness = replay_randomness
        self.check_finite = check_finite
        self.operator: Operator | None = None
        super().__init__(base.param_groups, {**base.defaults, "rho": rho})
        self._share()
        self._draws = Draws(operators, mask_interval, seed)
        self._backup = Backup()
        self._pending: list[Pass | None] = []  # passes left in this step; None: a plain one

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:  # type: ignore[override]
        """Takes one step and returns the loss at w.

        Args:
            closure: clears the gradients, computes the loss, calls backward and returns the loss;
                called once at w and once per pass of the rule (C-SAM has two, all others one). None
                takes a step of `base` with the gradients as they are: g~ after `compressed()`,
                otherwise a plain step.
        """
        if closure is None:
            self._require_no_pass_left()
            self.base.step()
            return None
        closure = torch.enable_grad()(closure)
        self._pending = []
        with self._same_randomness():
            loss = closure()  # g
        for left in reversed(range(len(self.rule.passes))):
            with self.compressed() as needed, self._same_randomness(last=left == 0):
                if needed:
                    closure()  # grad L(w~)
        self.base.step()  # w <- w - lr g~
        return loss

    @contextmanager
    def compressed(self, *, grad_scaler: GradScaler | None = None) -> Iterator[bool]:
        """Moves the weights to w~ for the length of a `with` block; then they are w again and `.grad` holds g~.

        On entry `.grad` must hold g. Inside, run backward on the same data, in as many
        micro-batches as g was made of; running statistics stand still. Whatever happens inside, w
        comes back bit for bit; after an exception `.grad` is g. The block is to be entered once per
        pass of the rule: once, for C-SAM twice.

        Args:
            grad_scaler: the scaler that scaled the losses, if any. g~ stays scaled for its `step`,
                which also skips the step if either pass overflowed.

        Yields:
            False in a plain base step (`base_step_probability`), where what is run inside does not
            count.
        """
        one = self._next_pass()
        g = self._take_gradients()
        masks = None
        self._backup.save(self._moved_by(one))  # w
        try:
            if one is not None and one.ascend:
                self._ascend_(g, grad_scaler)  # w + rho g
            if one is not None and one.compress and self.operator is not None:
                masks = self._draws.compress_(self.operator, self.weights, at=len(self._pending))
            with frozen_statistics(self.model):  # w~ = C(w + rho g)
                yield one is not None
        except BaseException:
            self._abandon(g)
            raise
        finally:
            self._backup.restore()  # w
        self._pending.pop(0)
        self._combine(one, g, masks)  # g~ = M * grad L(w~) + g
        self._check_finite(one, g, grad_scaler)

    def _next_pass(self) -> Pass | None:
        """Returns the pass that comes next; a step begins with drawing what it is to be."""
        if not self._pending:
            plain = self._draws.happens(self.base_step_probability)
            compresses = self.rule.compresses and not plain
            self.operator = self._draws.operator() if compresses else None
            self._pending = [None if plain else one for one in self.rule.passes]
        return self._pending[0]

    def _take_gradients(self) -> Gradients:
        """Takes g out of `.grad`, which is empty afterwards."""
        g = {p: p.grad for p in self._parameters() if p.grad is not None}
        if not g:
            raise RuntimeError("there is no gradient at w: run backward before the compressed pass")
        for parameter, gradient in g.items():
            if gradient.layout is not torch.strided:
                name = self._name(parameter)
                raise ValueError(f"the gradient of {name!r} is {gradient.layout}, not dense")
        for parameter in g:
            parameter.grad = None
        return g

    def _moved_by(self, one: Pass | None) -> list[Tensor]:
        ascending = self._parameters() if one is not None and one.ascend else []
        compressed = self.weights.values() if one is not None and one.compress else ()
        return list(dict.fromkeys([*ascending, *compressed]))

    def _ascend_(self, g: Gradients, grad_scaler: GradScaler | None) -> None:
        """W <- w + rho g, or w + rho g/|g|; a loss scale in g does not count."""
        unit: float | Tensor = 1.0
        if self.normalize:
            unit = 1 / (get_total_norm(g.values()) + 1e-12)
        elif grad_scaler is not None and grad_scaler.is_enabled():
            unit = 1 / grad_scaler.scale(torch.ones((), device=next(iter(g)).device))
        for group in self.param_groups:
            moved = [p for p in group["params"] if p in g]
            add_scaled_(moved, [g[p] for p in moved], group["rho"] * unit)

    def _combine(self, one: Pass | None, g: Gradients, masks: Masks | None) -> None:
        """Leaves M * grad L(w~) in `.grad`, plus g where the rule says so; g alone in a plain step."""
        if one is None:
            return self._put_gradients(g)
        if one.mask and self.sparse_gradients and masks is not None:
            found = {n: gradient for n in masks if (gradient := self.weights[n].grad) is not None}
            zero_unmasked_(list(found.values()), [masks[name] for name in found])
        if one.plus:
            both = [p for p in g if p.grad is not None]
            add_scaled_([p.grad for p in both if p.grad is not None], [g[p] for p in both], 1.0)
            self._put_gradients({p: gradient for p, gradient in g.items() if p.grad is None})
        return None

    def _check_finite(self, one: Pass | None, g: Gradients, grad_scaler: GradScaler | None) -> None:
        """Refuses gradients that are not finite, or leaves it to the scaler, which looks at `.grad`."""
        scaled = grad_scaler is not None and grad_scaler.is_enabled()
        if not scaled and not self.check_finite:
            return
        hidden = {} if one is None or one.plus else g  # g~ does not hold g
        left = {p: p.grad for p in self._parameters() if p.grad is not None}
        worst = get_total_norm([*hidden.values(), *left.values()], norm_type=torch.inf)
        if scaled:
            if hidden and left:
                next(iter(left.values())).add_(worst * 0)  # NaN if g overflowed
        elif not bool(torch.isfinite(worst)):
            self._abandon(left)
            self._raise_not_finite([*hidden.items(), *left.items()])

    def _raise_not_finite(self, gradients: Sequence[tuple[Tensor, Tensor]]) -> None:
        bad = {self._name(p): None for p, g in gradients if not bool(torch.isfinite(g).all())}
        raise FloatingPointError(
            f"NaN or infinite gradient with operator {self.operator}, no step was taken; in: {', '.join(bad)}"
        )

    def _abandon(self, gradients: Gradients) -> None:
        """Ends a step half-way: no pass is left, no mask of it is kept."""
        self._pending = []
        self._draws.forget(self.operator)
        self.zero_grad()
        self._put_gradients(gradients)

    def _require_no_pass_left(self) -> None:
        if self._pending:
            done = len(self.rule.passes) - len(self._pending)
            raise RuntimeError(
                f"{self.rule.name} enters compressed() {len(self.rule.passes)} times before a step, not {done}"
            )

    @staticmethod
    def _put_gradients(gradients: Gradients) -> None:
        for parameter, gradient in gradients.items():
            parameter.grad = gradient

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, p in self.model.named_parameters() if p is parameter)

    def _same_randomness(self, *, last: bool = False) -> AbstractContextManager[None]:
        """Rewinds the random generators after a pass, so that the next one sees the same numbers."""
        devices = {p.device for p in self._parameters() if p.is_cuda}
        return torch.random.fork_rng(devices, enabled=self.replay_randomness and not last)

    def _share(self) -> None:
        """Makes the groups and the state of the base optimizer those of this one, too."""
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer."""
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of the base optimizer and, under "cram", that of the draws."""
        return {**self.base.state_dict(), "cram": self._draws.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues from `state_dict`; one of the bare base optimizer is welcome, too."""
        self.base.load_state_dict({k: v for k, v in state_dict.items() if k != "cram"})
        self._share()
        for group in self.param_groups:
            group.setdefault("rho", self.defaults["rho"])
        if "cram" in state_dict:
            self._draws.load_state_dict(state_dict["cram"], self.weights)

    def __repr__(self) -> str:
        operators = ", ".join(map(str, self._draws.operators))
        return (
            f"CrAM({self.rule.name}, [{operators}], rho={self.defaults['rho']}, base={self.base!r})"
        )
