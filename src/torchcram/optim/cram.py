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

from torchcram.batchnorm import FrozenStatistics
from torchcram.compress import compress
from torchcram.layers import LayerWeights, Masks, Weights, local_weights
from torchcram.operators import Operator, as_operator
from torchcram.optim import gradients
from torchcram.optim.checks import (
    PLAIN_STEP,
    check_arguments,
    check_ascent,
    check_closure,
    check_param_group,
    check_rule,
    check_still_scaled,
)
from torchcram.optim.gradients import (
    Gradients,
    NonFiniteGuard,
    all_finite,
    carry_overflow,
    raise_not_finite,
)
from torchcram.optim.rank_consistency import require_alike
from torchcram.optim.rules import CRAM_PLUS, Pass, UpdateRule
from torchcram.optim.sampler import OperatorSampler
from torchcram.optim.step_state import Backup, Randomness, StepState, UndoStack
from torchcram.optim.wrapper import Wrapper
from torchcram.sharding import ShardContext
from torchcram.trained import mark_trained, plain_name, unwrapped, warn_of_other_weights
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
            where there is one, decides instead. Plain steps are not checked.
        allow_plain_steps: let a `step()` that no compressed pass went before be a step of `base`
            with the gradient as it is. By default that is an error, since a loop that was not
            adapted to CrAM would otherwise train without it and never say so.
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
        allow_plain_steps: bool = False,
    ) -> None:
        check_rule(rule)
        given = (operators,) if isinstance(operators, (Operator, str)) else operators or ()
        drawn = tuple(as_operator(operator) for operator in given)
        check_arguments(model, base, drawn, rule, rho, mask_interval, base_step_probability)
        self._shard_context = ShardContext(model)
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
        self.allow_plain_steps = allow_plain_steps
        self._sampler = OperatorSampler(drawn if rule.compresses else (), mask_interval, seed)
        self._guard = NonFiniteGuard(base, self._shard_context, self._sampler.forget_all)
        self._now = StepState()
        self._backup = Backup(self._shard_context)
        self._undo = UndoStack()  # what leads from w~ back to w
        require_alike(self)
        mark_trained(model, self.weights)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Takes one step and returns the loss at w.

        Args:
            closure: clears the gradients, computes the loss, calls backward and returns the loss;
                called once at w and once per pass of the rule (C-SAM has two, all others one). None
                takes the step with the g~ that `compressed()` has left in `.grad`.
        """
        self._require_outside()
        if closure is None:
            self._require_ready()
            self._now.ready = False
            return self._guard.step()
        check_closure(closure)
        closure = torch.enable_grad()(closure)
        self._now.passes, self._now.ready = [], False
        before = self._randomness()
        loss = closure()  # g
        for _ in self.rule.passes:
            with self.compressed() as needed:
                if needed:
                    if before is not None:
                        before.replay()
                    closure()  # grad L(w~)
        self._now.ready = False
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
        try:
            self._now.g, self._now.ready = g, False
            one = self._next_pass()
            self._undo.push(self._forget_copies)  # of w~
            self._backup.save(self._moved_by(one))  # w
            self._undo.push(self._backup.restore)
            if one is not None and one.ascend:
                self._ascend_(by_group, grad_scaler)  # w + rho g
            if one is not None and one.compress:
                masks = self._compress_()  # C(w + rho g)
            self._forget_copies()  # of w
            self._prepare_layers(one, masks)
            yield one is not None  # at w~
            self._require_gradients(one, g)
            self._undo.unwind()  # w
            self._combine(one, g, masks)  # g~ = M * grad L(w~) + g
            self._check_finite(one, g, grad_scaler)
        except BaseException:
            self.restore()
            raise
        self._now.passes.pop(0)
        self._now.g, self._now.ready = None, not self._now.passes

    def restore(self) -> None:
        """Puts w back where a compressed pass was interrupted before it could; `.grad` is g then.

        Does nothing when no pass is under way. `step`, `compressed` and `state_dict` begin with it,
        so only who looks at the model itself after an interrupt has to call it.
        """
        g = self._now.g
        if g is None:
            return
        self._shard_context.recover()
        self._undo.unwind()
        self._abandon(g)
        self._now.g = None

    def compress(self, operator: Operator | str) -> nn.Module:
        """Returns a copy of the model in which the weights that were trained for it are compressed.

        The same as `compress(model, operator, weights=optimizer.weights)`; of a model in DDP or a
        compiled one, the copy is of the module inside.

        Args:
            operator: Operator, or its text, such as "global:0.9".
        """
        self.restore()
        model = unwrapped(self.model)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        weights = {names[id(weight)]: weight for weight in self.weights.values()}
        return compress(model, operator, weights=weights)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """What steps draw from."""
        return self._sampler.operators

    @property
    def operator(self) -> Operator | None:
        """The operator drawn last; None after a plain step and for SAM."""
        return self._now.plan.operator

    def _next_pass(self) -> Pass | None:
        """Returns the pass that comes next; a step begins with drawing what it is to be."""
        if not self._now.passes:
            self._now.plan = self._sampler.draw(self.base_step_probability)
            self._now.passes = [None if self._now.plan.plain else one for one in self.rule.passes]
        return self._now.passes[0]

    def _moved_by(self, one: Pass | None) -> list[Tensor]:
        ascending = self._parameters() if one is not None and one.ascend else []
        compressed = self.weights.values() if one is not None and one.compress else ()
        return list({id(p): p for p in (*ascending, *compressed)}.values())

    def _ascend_(self, g: list[Gradients], scaler: GradScaler | None) -> None:
        """Moves w to w + rho g, or to w + rho g/|g|; a loss scale in g does not count."""
        found = [pair for group in g for pair in group]
        unit: float | Tensor = 1.0
        if self.normalize:
            unit = gradients.one_over(self._shard_context.norm(found))
        elif scaler is not None and scaler.is_enabled():
            unit = 1 / scaler.scale(torch.ones((), device=found[0][1].device))
        if self.max_ascent_norm is not None:
            unit = unit * gradients.clipping(
                self._shard_context.norm(found) * unit, self.max_ascent_norm
            )
        for group, pairs in zip(self.param_groups, g, strict=True):
            w = self._shard_context.here([parameter for parameter, _ in pairs])
            along = self._shard_context.here([gradient for _, gradient in pairs])
            gradients.add_scaled_(w, along, self._rho_of(group) * unit)

    def _choose(self, weights: Weights | None) -> LayerWeights:
        """Returns what to compress, by default all that can be."""
        return weights_in(self.model, weights)

    def _compress_(self) -> Masks | None:
        """Compresses the weights by what this step has drawn."""
        here = local_weights(self.weights)
        return self._sampler.compress_(self._now.plan, here, at=len(self._now.passes))

    def _combine(self, one: Pass | None, g: Gradients, masks: Masks | None) -> None:
        """Leaves M * grad L(w~) in `.grad`, plus g if the rule says so; g in a plain step."""
        if one is None:
            self.zero_grad()
            gradients.put_gradients(g)
            return
        if one.mask and self.sparse_gradients and masks is not None:
            mask_gradients_(self.weights, masks)
        if one.plus:
            gradients.add_gradients(g, self._shard_context)

    def _check_finite(self, one: Pass | None, g: Gradients, scaler: GradScaler | None) -> None:
        """Refuses gradients that are not finite, or leaves it to the scaler, which sees `.grad`."""
        self._guard.forget_pending()
        scaled = scaler is not None and scaler.is_enabled()
        if not scaled and not self.check_finite:
            return
        left = gradients.gradients_of(self._parameters())
        hidden = [] if one is None or one.plus else g  # where g~ does not hold g
        if scaled:
            carry_overflow(hidden, into=left, shard_context=self._shard_context)
            if self._sampler.mask_interval > 1 and not all_finite(g, self._shard_context):
                self._sampler.forget(self.operator)
        elif not self._guard.check(hidden + left):
            raise_not_finite(hidden + left, self.model, self._shard_context)

    def _abandon(self, found: Gradients) -> None:
        """Ends a step half-way: no pass is left, no mask of it is kept."""
        self._now.passes = []
        self._guard.forget_pending()
        self._sampler.forget(self.operator)
        self.zero_grad()
        gradients.put_gradients(found)

    def _forget_copies(self) -> None:
        """Drops what autocast and FSDP have made of the weights."""
        torch.clear_autocast_cache()
        self._shard_context.reshard()

    def _prepare_layers(self, one: Pass | None, masks: Masks | None) -> None:  # noqa: ARG002
        """Readies the layers for passes at w~: no running statistics change there."""
        statistics = FrozenStatistics(self.model)
        self._undo.push(statistics.restore)
        statistics.freeze()

    def _require_ready(self) -> None:
        """Raises RuntimeError unless `.grad` holds g~, or holds nothing that a step would use."""
        if self._now.passes:
            passes = len(self.rule.passes)
            raise RuntimeError(
                f"{self.rule.name} enters compressed() {passes} times before a step; "
                f"{passes - len(self._now.passes)} so far"
            )
        if self._now.ready or self.allow_plain_steps:
            return
        moves = any(group.get("lr", 1) != 0 for group in self.param_groups)
        if moves and gradients.gradients_of(self._parameters()):
            raise RuntimeError(PLAIN_STEP.format(base=type(self.base).__name__))

    def _require_outside(self) -> None:
        """Puts w back if it is not there; raises RuntimeError if a `with` block is still at w~."""
        if self._now.g is None:
            return
        interrupted = self._undo.unwinding
        self.restore()
        if not interrupted:
            raise RuntimeError("the weights were at the compressed point: leave compressed() first")

    def _require_gradients(self, one: Pass | None, g: Gradients) -> None:
        if self._now.g is not g:
            raise RuntimeError("the weights were put back to w inside compressed(), which ends it")
        if one is not None and all(p.grad is None for p in self._parameters()):
            raise RuntimeError("there is no gradient at the compressed point: run backward inside")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, g~ included: see `torch.optim.Optimizer.zero_grad`."""
        self._now.ready = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer.

        Raises:
            ValueError: if a parameter is not one of the model, or its "rho" is not allowed.
        """
        if any(param_group is group for group in self.param_groups):
            return  # Optimizer.__init__ adds the groups of the base optimizer, which has them
        if isinstance(param_group.get("params"), Iterator):
            param_group["params"] = list(param_group["params"])
        check_param_group(self.model, self.base, param_group, number=len(self.param_groups))
        super().add_param_group(param_group)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _rho_of(self, group: dict[str, Any]) -> float:
        return float(self.rho if "rho" in self.base.defaults else group.get("rho", self.rho))

    def _weight_names(self) -> list[str]:
        return [plain_name(self.model, name) for name in self.weights]

    def _randomness(self) -> Randomness | None:
        devices = (parameter.device for parameter in self._parameters())
        return Randomness(devices) if self.replay_randomness else None

    def _extra_state(self) -> dict[str, Any]:
        self.restore()
        return {"cram": {**self._sampler.state_dict(), "weights": self._weight_names()}}

    def _read_extra_state(self, state: dict[str, Any]) -> Callable[[], None]:
        self._require_outside()
        names, here = self._weight_names(), local_weights(self.weights)
        load = self._sampler.read_state(state["cram"], here) if "cram" in state else None

        def continue_from_state() -> None:
            if load is not None:
                load()
                warn_of_other_weights(state["cram"].get("weights", names), names)
            self._now.passes, self._now.ready = [], False
            self._guard.reset()

        return continue_from_state

    def __getstate__(self) -> dict[str, Any]:
        self._require_outside()
        guard = NonFiniteGuard(self.base, self._shard_context, self._sampler.forget_all)
        scratch = {
            "_backup": Backup(self._shard_context),
            "_undo": UndoStack(),
            "_now": StepState(self._now.plan),
        }
        return {**super().__getstate__(), **scratch, "_guard": guard}

    def __repr__(self) -> str:
        operators = ", ".join(map(str, self.operators))
        return f"CrAM({self.rule.name}, [{operators}], rho={self.rho}, base={self.base!r})"
