"""The protocol that all methods share: gradient at w~, step of the base optimizer, new mask.

w    weights                         s(t)  sparsity at step t
M    mask, True keeps                w~    point that the gradient is computed at
g~   gradient that `base` steps with
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchcram.layers import local_weights
from torchcram.messages import list_names
from torchcram.operators import Operator, Sparsifier, as_operator
from torchcram.operators.base import require_shard_support
from torchcram.optim.checks import check_base, check_param_group
from torchcram.optim.sampler import pack_bits, unpack_bits
from torchcram.optim.step_state import Backup, UndoStack
from torchcram.optim.wrapper import Wrapper
from torchcram.sharding import ShardContext, local
from torchcram.trained import mark_trained
from torchcram.weights import apply_masks_, sparsity, weights_in, zero_unmasked_

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from torchcram.weights import Masks, Weights

STATE = "baseline"
"""Entry of `state_dict` that holds what a method adds to the state of the base optimizer."""


class Baseline(Wrapper):
    """Base class of the methods: a step in five parts.

    ::

        M  <- update_masks()        if the schedule says so
        w~ <- move_()               M * w, or w where the method computes gradients at w
        g~ <- combine_()            from grad L(w~)
        w  <- update_()             a step of `base` with g~
        w  <- project_()            M * w where the method holds its mask

    A method overrides the parts that differ. By default M stays, gradients are computed at w (with
    `moves = True` at M * w), g~ is that gradient, and `base` takes the step; `HeldMask` holds M.
    At the end of a training, `finish` leaves exactly the sparsity of `operator` in the model.

    Args:
        model: Model to train.
        base: Optimizer that takes the steps and keeps its own state. Attach learning-rate
            schedulers to this wrapper, not to `base`.
        operator: Target, such as "global:0.9".
        weights: Weights to prune; by default all `compressible_weights(model)`.

    Attributes:
        steps: Number of steps taken.
        masks: Masks M of the weights by name; True keeps.
        finished: Whether `finish` has been called; no further steps are possible then.
    """

    moves = False
    """Whether the method computes gradients at another point than w."""

    trains_to_target = True
    """Whether training itself leads to the sparsity of the target, and `finish` prunes the rest."""

    allowed_targets = "operators that prune, such as global:0.9, uniform:0.9 and nm:2:4"
    """Operators that the method can reach, for messages."""

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        weights: Weights | None = None,
    ) -> None:
        check_base(model, base)
        self.operator = self.check_operator(as_operator(operator))
        self._shard_context = ShardContext(model)
        if self._shard_context.sharded:
            require_shard_support([self.operator])
        super().__init__(base)
        self.model = model
        self.weights = weights_in(model, weights)
        self.steps = 0
        self.finished = False
        self.masks: dict[str, Tensor] = {
            name: torch.ones_like(weight, dtype=torch.bool, requires_grad=False)
            for name, weight in local_weights(self.weights).items()
        }
        self._backup = Backup(self._shard_context)
        self._undo = UndoStack()  # leads from w~ back to w
        self._at_point = False
        self._ready = False  # whether `.grad` was computed at w~
        self._begun = False  # whether this step has updated the masks
        self._captured = False  # whether `before_replay` updates them instead
        mark_trained(model, self.weights)

    @classmethod
    def check_operator(cls, operator: Operator) -> Sparsifier:
        """Returns the target if the method can reach it.

        Raises:
            ValueError: If it prunes nothing or is a range.
        """
        if not isinstance(operator, Sparsifier) or operator.is_range:
            raise ValueError(
                f"{cls.__name__} prunes to one target and cannot take {operator}; allowed are "
                f"{cls.allowed_targets}"
            )
        return operator

    def update_masks(self) -> None:
        """Selects new masks, if this step is one that does."""

    def set_step_numbers_(self) -> None:
        """Writes numbers that differ from step to step to tensors, where captured steps read them.

        It may be called several times in a step, and has to write the same numbers every time.
        """

    def move_(self) -> None:
        """Moves w to w~ = M * w, in place; only called where `moves` is True."""
        apply_masks_(self.weights, self.masks)

    def combine_(self) -> None:
        """Turns the gradient at w~ in `.grad` into g~, in place."""

    def update_(self) -> None:
        """Takes a step with g~."""
        self.base.step()

    def project_(self) -> None:
        """Changes w after the step."""

    def final_masks(self) -> Masks:
        """Returns masks of exactly the target's sparsity."""
        return self.operator.select(local_weights(self.weights))

    def final_weights_(self) -> None:
        """Changes w at the end; M is the final mask already, and is applied afterwards."""

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the tensors that the method keeps per weight, for `state_dict`."""
        return {}

    def set_masks(self, masks: Masks) -> None:
        """Replaces the masks, at the addresses that a captured graph reads."""
        torch._foreach_copy_([self.masks[name] for name in masks], list(masks.values()))

    def hold_(self) -> None:
        """Zeroes the pruned weights and their moments, as after a change of the masks."""
        apply_masks_(self.weights, self.masks)
        for name, mask in self.masks.items():
            moments = self._moments(self.weights[name])
            zero_unmasked_(moments, [mask] * len(moments))

    def reset_base_(self) -> None:
        """Resets the state of the base optimizer, its counts of steps too, in the same memory."""
        for entries in self.state.values():
            for value in entries.values():
                if isinstance(value, Tensor):
                    local(value).zero_()

    def train_also(
        self,
        kind: str,
        tensors: Mapping[str, Tensor],
        *,
        lr: float | None = None,
        weight_decay: float | None = None,
    ) -> None:
        """Makes `base` train tensors beside the weights; `combine_` sets their gradients.

        They form the last parameter group, with the options of the group of the weights.

        Args:
            kind: Name of the tensors, such as "scores".
            tensors: Tensors by the names of their weights.
            lr: Learning rate of the tensors; by default that of the weights.
            weight_decay: Weight decay of the tensors; by default that of the weights.
        """
        first = next(iter(self.weights.values()))
        groups = [group for group in self.param_groups if any(p is first for p in group["params"])]
        options = dict((groups or self.param_groups)[0])
        del options["params"]
        named = options.pop("param_names", None) is not None
        if isinstance(options["lr"], Tensor):  # a scheduler writes to the tensor of each group
            options["lr"] = options["lr"].clone()
        if lr is not None:
            # for schedules that set the learning rate of all groups
            options["lr_ratio"] = lr / float(options["lr"]) if options["lr"] else 1.0
            options["lr"] = lr
        if weight_decay is not None:
            options["weight_decay"] = weight_decay
        members = [
            (f"{kind}.{name}", tensor) if named else tensor for name, tensor in tensors.items()
        ]
        self.base.add_param_group({"params": members, **options})

    def require_whole(self) -> None:
        """Raises ValueError if weights are sharded, for methods that need whole layers."""
        if self._shard_context.sharded:
            raise ValueError(
                f"{type(self).__name__} needs whole weights on every rank, and the model is "
                "sharded; allowed are one process and DistributedDataParallel"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # noqa: ANN401
        """Takes one step; returns the loss at w~.

        Args:
            closure: Function that clears the gradients, computes the loss, calls backward and
                returns the loss; it is called at w~. None takes the step with the gradient that is
                in `.grad`, computed inside `compressed()` where the method moves the weights.
        """
        self._require_unfinished()
        loss = None
        if closure is not None:
            with self.compressed():
                loss = torch.enable_grad()(closure)()
        elif self.moves and not self._ready:
            raise RuntimeError(
                f"step() would use a gradient at w: {type(self).__name__} needs it at w~. Either "
                "pass a closure, optimizer.step(closure), or run the forward and backward pass in "
                "`with optimizer.compressed():` before optimizer.step()"
            )
        self._begin()
        self.combine_()
        self.update_()
        self._count_step()
        self.project_()
        return loss

    @contextmanager
    def compressed(self) -> Iterator[bool]:
        """Moves the weights to w~ for a `with` block in which forward and backward run.

        Whatever happens inside, w comes back bit for bit. Where the method computes gradients at w
        itself, the block changes nothing.

        Yields:
            True: the pass is always needed.
        """
        self._require_unfinished()
        with torch.no_grad():
            self._begin()
        if self.moves:
            with self._at(self.move_):
                yield True
        else:
            yield True
        self._ready = True

    @contextmanager
    def pruned(self) -> Iterator[None]:
        """Moves the weights to the point that the model is tested at, for a `with` block.

        Unlike `compressed`, it changes nothing that a step depends on.
        """
        self._require_outside()
        if self.finished or not self.moves:
            yield
            return
        with self._at(self.test_point_):
            yield

    def reached_sparsity(self) -> float:
        """Returns the fraction of zeros at the point that the model is tested at.

        Before `finish`, that is what the schedule, the thresholds or the gates have led to.
        """
        with self.pruned():
            return sparsity(self.weights)

    @contextmanager
    def _at(self, move_: Callable[[], None]) -> Iterator[None]:
        """Moves the weights for a `with` block; whatever happens inside, w comes back."""
        try:
            self._at_point = True
            self._undo.push(self._drop_copies)  # made of w~
            self._backup.save(self.weights.values())
            self._undo.push(self._backup.restore)
            with torch.no_grad():
                move_()
            self._drop_copies()  # made of w
            yield
        finally:
            self.restore()

    def test_point_(self) -> None:
        """Moves w to the point that the model is tested at: w~, unless that is a random one."""
        self.move_()

    def lr_position(self, step: int, steps: int) -> tuple[int, int]:
        """Returns the position of a step in the schedule of the learning rate, and its length.

        Args:
            step: Number of the step, from 0.
            steps: Number of steps of the whole training.
        """
        return step, steps

    def check_length(self, steps: int) -> None:
        """Raises ValueError if a training of `steps` steps is too short for the method."""

    def restore(self) -> None:
        """Puts w back after a pass at w~ was interrupted; otherwise does nothing."""
        self._undo.unwind()
        self._at_point = False

    @torch.no_grad()
    def finish(self) -> Masks:
        """Prunes the model to exactly the target, and returns the masks, for `hold_masks`.

        It ends the training: a second call changes nothing.
        """
        self._require_outside()
        if not self.finished:
            self.set_masks(self.final_masks())
            self.final_weights_()
            self.finished = True
        apply_masks_(self.weights, self.masks)
        return self.masks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients: see `torch.optim.Optimizer.zero_grad`."""
        self._ready = False
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group to the base optimizer.

        Raises:
            ValueError: If a parameter is not part of the model.
        """
        if any(param_group is group for group in self.param_groups):
            return  # Optimizer.__init__ adds groups that the base optimizer has already
        check_param_group(self.model, self.base, param_group, number=len(self.param_groups))
        super().add_param_group(param_group)

    @torch.no_grad()
    def before_replay(self) -> None:
        """Updates the masks for a step that is replayed as a CUDA graph, and counts it."""
        self._require_unfinished()
        self._begin()
        self._count_step()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Leaves the masks and the count of steps alone, for a `with` block."""
        self._captured = True
        try:
            yield
        finally:
            self._captured = False

    def kept_tensors(self) -> list[Tensor]:
        """Returns the masks and the tensors of the method."""
        others = (value for values in self.tensors().values() for value in values.values())
        return [*self.masks.values(), *others]

    def _begin(self) -> None:
        if self._captured:
            return
        if not self._begun:
            self.update_masks()
            self._begun = True
        self.set_step_numbers_()

    def _count_step(self) -> None:
        if not self._captured:
            self.steps += 1
        self._begun = self._ready = False

    def _moments(self, weight: Tensor) -> list[Tensor]:
        """Returns the state of the base optimizer that has an entry for every weight."""
        return [
            local(value)
            for value in self.state.get(weight, {}).values()
            if isinstance(value, Tensor) and value.shape == weight.shape
        ]

    def _drop_copies(self) -> None:
        """Drops the copies of the weights that autocast and FSDP have made."""
        torch.clear_autocast_cache()
        self._shard_context.reshard()

    def _require_outside(self) -> None:
        """Puts w back after an interrupt; raises RuntimeError inside a `with` block at w~."""
        if not self._at_point:
            return
        interrupted = self._undo.unwinding
        self.restore()
        if not interrupted:
            raise RuntimeError("the weights were at w~: leave compressed() first")

    def _require_unfinished(self) -> None:
        self._require_outside()
        if self.finished:
            raise RuntimeError(
                "finish() has ended the training; to train on with the masks held, use "
                "hold_masks(optimizer.base, optimizer.weights, masks) and optimizer.base.step()"
            )

    def _extra_state(self) -> dict[str, Any]:
        self._require_outside()
        return {
            STATE: {
                "method": type(self).__name__,
                "steps": self.steps,
                "begun": self._begun,
                "finished": self.finished,
                "masks": {name: pack_bits(mask) for name, mask in self.masks.items()},
                "tensors": {kind: dict(values) for kind, values in self.tensors().items()},
            }
        }

    def _read_extra_state(self, state: dict[str, Any]) -> Callable[[], None]:
        self._require_outside()
        if STATE not in state:
            return lambda: None
        extra = state[STATE]
        method, ours = extra.get("method"), type(self).__name__
        if method != ours:
            raise ValueError(f"the state is one of {method}, this optimizer is {ours}")
        kept = self.tensors()
        for kind, names in {"masks": self.masks, **kept}.items():
            loaded = extra["masks"] if kind == "masks" else extra["tensors"].get(kind, {})
            if loaded.keys() != names.keys():
                different = list_names(sorted(loaded.keys() ^ names.keys()))
                raise ValueError(f"the {kind} of the state are those of other weights: {different}")

        def load() -> None:
            self.steps = int(extra["steps"])
            self._begun = bool(extra.get("begun", False))
            self._ready = False
            self.finished = bool(extra.get("finished", False))
            self.set_masks({n: unpack_bits(extra["masks"][n], m) for n, m in self.masks.items()})
            for kind, values in kept.items():
                for name, value in values.items():
                    value.copy_(extra["tensors"][kind][name])

        return load

    def __getstate__(self) -> dict[str, Any]:
        self._require_outside()
        scratch = {"_backup": Backup(self._shard_context), "_undo": UndoStack()}
        return {**super().__getstate__(), **scratch}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.operator}, base={self.base!r})"
