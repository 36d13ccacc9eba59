"""CrAM, the compression-aware minimizer (Peste et al., ICLR 2023), around any base optimizer.

w    weights                        C    compression operator, M its mask
g    grad L(w)                      w~   the perturbed, compressed point
rho  factor of the ascent           g~   what the base optimizer steps with
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
from torchcram.messages import list_names
from torchcram.operators import Operator, as_operator
from torchcram.operators.base import require_shard_support
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
from torchcram.optim.step_state import Backup, RngState, StepState, UndoStack, WeightBackup
from torchcram.optim.wrapper import Wrapper
from torchcram.sharding import ShardContext
from torchcram.trained import mark_trained, plain_name, unwrapped, warn_of_other_weights
from torchcram.weights import mask_gradients_, weights_in

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.optim import Optimizer


class CrAM(Wrapper):
    """Steps `base` with g~ = M * grad L(C(w + rho g)) + g; `rule` selects other formulas for g~.

    The passes may see the same batch, so that a step costs two, or different parts of it
    (`split_batch`): with a half each a step costs as much as a plain one, with the whole batch at w
    and a half at w~ one and a half times as much. Take halves for training from scratch of the
    usual length, and the whole batch for fine-tuning and where much more can be spent.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps and keeps its own state. Attach learning-rate
            schedulers to this wrapper, not to `base`.
        operators: Operator, its text such as "global:0.9", or a sequence of either, from which
            every step draws one uniformly ("-Multi"). SAM needs none.
        rho: Factor of the ascent w + rho g, and its length where g is normalized. None takes that
            of the rule: 0.05 for SAM and C-SAM, and otherwise 0, which is no ascent and needs no
            tuning. The paper uses 0.05 to 0.15 for SGD and 0.005 for Adam. A parameter group of
            `base` with its own "rho" overrides it, unless that is an option of `base` itself, as in
            Adadelta.
        rule: Update rule: `SAM`, `CRAM`, `CRAM_PLUS`, `C_SAM`, `TOPK` or `TOPK_PLUS`.
        sparse_gradients: Whether to multiply gradients by M where the rule does; False never does.
        normalize: Whether to ascend along g/|g|; None leaves it to the rule.
        max_ascent_norm: Norm that g is clipped to for the ascent, as by `clip_grad_norm_`. The g
            that CrAM+ adds is not clipped. None clips nothing.
        mask_interval: Number of uses of an operator after which its mask is computed anew.
        base_step_probability: Probability that a step is a plain step of `base`.
        weights: Weights to compress; by default all `compressible_weights(model)`.
        seed: Seed of the generator that operators are drawn from; only `CrAM` uses it.
        replay_randomness: Whether all passes of `step(closure)` see the same random numbers, and so
            the same dropout.
        check_finite: Whether to raise FloatingPointError instead of stepping when a gradient is NaN
            or infinite. The host waits for the device to find out, except with a fused base
            optimizer on CUDA: that one skips the step on the device, and the next step raises the
            error. With a GradScaler, the scaler decides instead. Plain steps by
            `allow_plain_steps` are not checked.
        allow_plain_steps: Whether a `step()` without a compressed pass before it is a plain step of
            `base`. By default it is an error: otherwise a loop that was not adapted to CrAM would
            train without it unnoticed.
    """

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operators: Operator | str | Sequence[Operator | str] | None,
        *,
        rho: float | None = None,
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
        listed = (operators,) if isinstance(operators, (Operator, str)) else operators or ()
        choices = tuple(as_operator(operator) for operator in listed)
        check_arguments(model, base, choices, rule, rho, mask_interval, base_step_probability)
        self._shard_context = ShardContext(model)
        if self._shard_context.sharded:
            require_shard_support(choices)
        super().__init__(base)
        self.model = model
        self.weights = self._select_weights(weights) if rule.compresses else LayerWeights({})
        self.rho = rule.rho if rho is None else rho
        self.rule = rule
        self.sparse_gradients = sparse_gradients
        self.normalize = rule.normalize if normalize is None else normalize
        rhos = map(self._rho_of, self.param_groups)
        check_ascent(max_ascent_norm, rule, normalize=self.normalize, rhos=rhos)
        self.max_ascent_norm = max_ascent_norm
        self.base_step_probability = base_step_probability
        self.replay_randomness = replay_randomness
        self.check_finite = check_finite
        self.allow_plain_steps = allow_plain_steps
        self._sampler = OperatorSampler(choices if rule.compresses else (), mask_interval, seed)
        self._guard = NonFiniteGuard(base, self._shard_context, self._sampler.forget_all)
        self._step_state = StepState()
        self._backup: WeightBackup = Backup(self._shard_context)
        self._undo = UndoStack()  # leads from w~ back to w
        require_alike(self)
        mark_trained(model, self.weights)

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        compressed_closure: Callable[[], Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Takes one step and returns the loss at w.

        Args:
            closure: Function that clears the gradients, computes the loss, calls backward and
                returns the loss. It is called once at w and once per pass of the rule (C-SAM has
                two passes, all others one). None takes the step with the g~ that `compressed()`
                has left in `.grad`.
            compressed_closure: Function that is called in place of `closure` in the passes at w~,
                for a step whose passes see different parts of a batch (see `split_batch`).

        Raises:
            ValueError: If there is a `compressed_closure` and no `closure`.
        """
        self._require_outside()
        if closure is None:
            if compressed_closure is not None:
                raise ValueError("compressed_closure needs a closure for the pass at w")
            self._require_ready()
            self._step_state.ready = False
            return self._guard.step()
        check_closure(closure)
        closure = torch.enable_grad()(closure)
        at_compressed = torch.enable_grad()(compressed_closure or closure)
        self._step_state.passes, self._step_state.ready = [], False
        rng_state = self._rng_state()
        self._backup.start_step()
        loss = closure()  # g
        for _ in self.rule.passes:
            with self.compressed() as needed:
                if needed:
                    if rng_state is not None:
                        rng_state.restore()
                    at_compressed()  # grad L(w~)
        self._step_state.ready = False
        self._guard.step()  # w <- w - lr g~
        return loss

    @contextmanager
    def compressed(self, *, grad_scaler: GradScaler | None = None) -> Iterator[bool]:
        """Moves the weights to w~ for a `with` block; after it they are w and `.grad` holds g~.

        On entry `.grad` must hold g. Inside, run backward on the data of the pass at w~, which may
        be other data than that of g, in any number of micro-batches; running statistics do not
        change. Whatever happens inside, w comes back bit for bit; after an exception `.grad` is g.
        Enter the block once per pass of the rule: twice for C-SAM, once for all others.

        Args:
            grad_scaler: Scaler that scaled the losses, if any. g~ stays scaled for its `step`,
                which also skips the step if either pass overflowed.

        Yields:
            Whether the pass is needed. In a plain base step (`base_step_probability`) it is not,
            and gradients computed inside are dropped.
        """
        self._require_outside()
        check_still_scaled(self, grad_scaler)
        by_group = gradients.take_gradients(self.param_groups)
        g = [pair for group in by_group for pair in group]
        masks = None
        try:
            self._step_state.g, self._step_state.ready = g, False
            pass_ = self._next_pass()
            self._undo.push(self._drop_copies)  # made of w~
            self._undo.push(self._backup.restore)
            self._backup.save(self._moved_by(pass_))  # w
            if self._ascends(pass_):
                self._ascend_(by_group, grad_scaler)  # w + rho g
            if pass_.compress:
                masks = self._compress_()  # C(w + rho g)
            self._drop_copies()  # made of w
            self._prepare_layers(pass_, masks)
            yield not self._step_state.plan.plain  # at w~
            self._require_gradients(g)
            self._undo.unwind()  # w
            bad = self._combine(pass_, g, masks)  # g~ = M * grad L(w~) + g
            self._check_finite(pass_, g, grad_scaler, bad)
        except BaseException:
            self.restore()
            raise
        self._step_state.passes.pop(0)
        self._step_state.g, self._step_state.ready = None, not self._step_state.passes

    def _next_pass(self) -> Pass:
        """Returns the pass that comes next; the first pass of a step draws the operator."""
        if not self._step_state.passes:
            plan = self._step_state.plan = self._sampler.draw(self.base_step_probability)
            passes = self.rule.passes
            self._step_state.passes = [Pass()] * len(passes) if plan.plain else list(passes)
        return self._step_state.passes[0]

    def _moved_by(self, pass_: Pass) -> list[Tensor]:
        """Returns the parameters that a pass changes."""
        ascending = self._parameters() if self._ascends(pass_) else []
        compressed = self.weights.values() if pass_.compress else ()
        return list({id(p): p for p in (*ascending, *compressed)}.values())

    def _ascend_(self, by_group: list[Gradients], scaler: GradScaler | None) -> None:
        """Moves w to w + rho g, or w + rho g/|g|; a loss scale in g is divided out."""
        g = [pair for group in by_group for pair in group]
        unit: float | Tensor = 1.0
        if self.normalize:
            unit = gradients.one_over(self._shard_context.norm(g))
        elif scaler is not None and scaler.is_enabled():
            unit = 1 / scaler.scale(torch.ones((), device=g[0][1].device))
        if self.max_ascent_norm is not None:
            norm = self._shard_context.norm(g) * unit
            unit = unit * gradients.clipping(norm, self.max_ascent_norm)
        for group, pairs in zip(self.param_groups, by_group, strict=True):
            rho = self._rho_of(group)
            if rho == 0:
                continue
            w = self._shard_context.local([parameter for parameter, _ in pairs])
            direction = self._shard_context.local([gradient for _, gradient in pairs])
            gradients.add_scaled_(w, direction, rho * unit)

    def _compress_(self) -> Masks | None:
        """Compresses the weights with the operator that this step has drawn."""
        local = local_weights(self.weights)
        at = len(self._step_state.passes)
        return self._sampler.compress_(self._step_state.plan, local, at=at)

    def _drop_copies(self) -> None:
        """Drops the copies of the weights that autocast and FSDP have made."""
        torch.clear_autocast_cache()
        self._shard_context.reshard()

    def _prepare_layers(self, pass_: Pass, masks: Masks | None) -> None:  # noqa: ARG002
        """Prepares the layers for passes at w~: running statistics do not change there."""
        statistics = FrozenStatistics(self.model)
        self._undo.push(statistics.restore)
        statistics.freeze()

    def _combine(self, pass_: Pass, g: Gradients, masks: Masks | None) -> Tensor | None:
        """Leaves M * grad L(w~) in `.grad`, plus g if the rule says so; g in a plain step.

        Returns:
            Flag on the device, 1.0 if g~ is not finite, where adding g has found that out, too.
        """
        if self._step_state.plan.plain:
            self.zero_grad()
            gradients.put_gradients(g)
            return None
        if masks is None or not (pass_.mask and self.sparse_gradients):
            masks = {}
        if pass_.plus:
            parameters, sharding = self._parameters(), self._shard_context
            return gradients.add_to_masked(g, parameters, self.weights, masks, sharding)
        mask_gradients_(self.weights, masks)
        return None

    def _check_finite(
        self, pass_: Pass, g: Gradients, scaler: GradScaler | None, bad: Tensor | None
    ) -> None:
        """Raises FloatingPointError for NaN or infinity, or leaves them in `.grad` for `scaler`."""
        self._guard.forget_pending()
        scaled = scaler is not None and scaler.is_enabled()
        if not scaled and not self.check_finite:
            return
        combined = gradients.gradients_of(self._parameters())
        # if g is not part of g~, NaN in g does not show there
        hidden = [] if self._step_state.plan.plain or pass_.plus else g
        if scaled:
            carry_overflow(hidden, into=combined, shard_context=self._shard_context)
            if self._sampler.mask_interval > 1 and not all_finite(g, self._shard_context):
                self._sampler.forget(self.operator)
        elif not self._guard.check(hidden + combined, bad):
            raise_not_finite(hidden + combined, self.model, self._shard_context)

    def restore(self) -> None:
        """Puts w back after a compressed pass was interrupted; `.grad` is g then.

        Does nothing when no pass is under way. `step`, `compressed` and `state_dict` call it first,
        so call it only to use the model itself after an interrupt.
        """
        g = self._step_state.g
        if g is None:
            return
        self._shard_context.recover()
        self._undo.unwind()
        self._abandon(g)
        self._step_state.g = None

    def _abandon(self, g: Gradients) -> None:
        """Ends an interrupted step: `.grad` is g, and no mask that the step computed is kept."""
        self._step_state.passes = []
        self._guard.forget_pending()
        self._sampler.forget(self.operator)
        self.zero_grad()
        gradients.put_gradients(g)

    def _require_outside(self) -> None:
        """Puts w back after an interrupt; raises RuntimeError inside a `with` block at w~."""
        if self._step_state.g is None:
            return
        interrupted = self._undo.unwinding
        self.restore()
        if not interrupted:
            raise RuntimeError("the weights were at the compressed point: leave compressed() first")

    def _require_ready(self) -> None:
        """Raises RuntimeError unless `.grad` holds g~ or a step would change nothing."""
        if self._step_state.passes:
            passes = len(self.rule.passes)
            raise RuntimeError(
                f"{self.rule.name} needs compressed() {passes} times before a step, got "
                f"{passes - len(self._step_state.passes)}"
            )
        if self._step_state.ready or self.allow_plain_steps:
            return
        moves = any(group.get("lr", 1) != 0 for group in self.param_groups)
        if moves and gradients.gradients_of(self._parameters()):
            raise RuntimeError(PLAIN_STEP.format(base=type(self.base).__name__))

    def _require_gradients(self, g: Gradients) -> None:
        """Raises RuntimeError unless the `with` block has computed gradients at w~."""
        if self._step_state.g is not g:
            raise RuntimeError("the weights were put back to w inside compressed(), which ends it")
        if not self._step_state.plan.plain and all(p.grad is None for p in self._parameters()):
            raise RuntimeError("there is no gradient at the compressed point: run backward inside")

    def compress(self, operator: Operator | str, model: nn.Module | None = None) -> nn.Module:
        """Returns a copy of the model with the weights compressed that were trained for it.

        The same as `compress(model, operator, weights=optimizer.weights)`. If the model is wrapped
        by DDP or compiled, the copy is of the module inside.

        Args:
            operator: Operator, or its text, such as "global:0.9".
            model: Model of the same architecture to compress instead of the one that is trained,
                such as an average of its weights.

        Raises:
            ValueError: If a weight that was trained is not a parameter of the model.
        """
        self.restore()
        trained = unwrapped(self.model)
        model = trained if model is None else unwrapped(model)
        plain = {id(parameter): name for name, parameter in trained.named_parameters()}
        chosen = {name: plain.get(id(weight)) for name, weight in self.weights.items()}
        parameters = dict(model.named_parameters())
        if missing := [name for name, own in chosen.items() if own not in parameters]:
            raise ValueError(
                f"{list_names(missing)}: trained for compression, but no parameter of this "
                f"{type(model).__name__}; a layer that was replaced needs a new CrAM"
            )
        weights = {name: parameters[name] for name in chosen.values() if name is not None}
        return compress(model, operator, weights=weights)

    @property
    def operators(self) -> tuple[Operator, ...]:
        """Operators that steps draw from."""
        return self._sampler.operators

    @property
    def operator(self) -> Operator | None:
        """Operator that was drawn last; None after a plain step and for SAM."""
        return self._step_state.plan.operator

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients, g~ included: see `torch.optim.Optimizer.zero_grad`."""
        self._step_state.ready = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer.

        Raises:
            ValueError: If a parameter is not part of the model, or "rho" is negative or not finite.
        """
        if any(param_group is group for group in self.param_groups):
            return  # Optimizer.__init__ adds groups that the base optimizer has already
        if isinstance(param_group.get("params"), Iterator):
            param_group["params"] = list(param_group["params"])
        check_param_group(self.model, self.base, param_group, number=len(self.param_groups))
        super().add_param_group(param_group)

    def _select_weights(self, weights: Weights | None) -> LayerWeights:
        """Returns the weights to compress, by default all that can be compressed."""
        return weights_in(self.model, weights)

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _rho_of(self, group: dict[str, Any]) -> float:
        rho = self.rho if "rho" in self.base.defaults else group.get("rho", self.rho)
        return float(rho)

    def _ascends(self, pass_: Pass) -> bool:
        """Returns whether a pass moves along the gradient: rho = 0 leaves the weights at w."""
        return pass_.ascend and any(self._rho_of(group) > 0 for group in self.param_groups)

    def _weight_names(self) -> list[str]:
        return [plain_name(self.model, name) for name in self.weights]

    def _rng_state(self) -> RngState | None:
        devices = (parameter.device for parameter in self._parameters())
        return RngState(devices) if self.replay_randomness else None

    def _extra_state(self) -> dict[str, Any]:
        self.restore()
        return {"cram": {**self._sampler.state_dict(), "weights": self._weight_names()}}

    def _read_extra_state(self, state: dict[str, Any]) -> Callable[[], None]:
        self._require_outside()
        names, local = self._weight_names(), local_weights(self.weights)
        load = self._sampler.read_state(state["cram"], local) if "cram" in state else None

        def load_extra_state() -> None:
            if load is not None:
                load()
                warn_of_other_weights(state["cram"].get("weights", names), names)
            self._step_state.passes, self._step_state.ready = [], False
            self._guard.reset()

        return load_extra_state

    def __getstate__(self) -> dict[str, Any]:
        self._require_outside()
        guard = NonFiniteGuard(self.base, self._shard_context, self._sampler.forget_all)
        scratch = {
            "_backup": Backup(self._shard_context),
            "_undo": UndoStack(),
            "_step_state": StepState(self._step_state.plan),
        }
        return {**super().__getstate__(), **scratch, "_guard": guard}

    def __repr__(self) -> str:
        operators = ", ".join(map(str, self.operators))
        return f"CrAM({self.rule.name}, [{operators}], rho={self.rho}, base={self.base!r})"
