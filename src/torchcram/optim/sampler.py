"""Draws the operator of each step, and keeps masks between the steps that compute them anew."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torchcram.operators import Operator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from torchcram.weights import Masks, Weights


@dataclass(frozen=True)
class StepPlan:
    """Plan of one step.

    Attributes:
        plain: Whether it is a plain step of the base optimizer.
        operator: Operator that was drawn, if any.
        level: Operator at one sparsity if `operator` is a range, otherwise `operator` itself.
        anew: Whether to compute the masks anew instead of reusing those of the last use.
    """

    plain: bool = False
    operator: Operator | None = None
    level: Operator | None = None
    anew: bool = True


class OperatorSampler:
    """Draws operators with a generator of its own, so that all ranks draw the same.

    Every operator counts its own uses. Its mask is computed anew at every `mask_interval`-th use
    and reused at the uses in between.
    """

    def __init__(self, operators: Sequence[Operator], mask_interval: int, seed: int) -> None:
        self.operators = tuple(operators)
        self.mask_interval = mask_interval
        self._forced: StepPlan | None = None  # plan of all steps, instead of drawing one
        self.seed = seed
        self._generator = torch.Generator().manual_seed(seed)
        self._uses: Counter[Operator] = Counter()
        self._masks: dict[tuple[Operator, int], Masks] = {}  # by operator and pass of the rule

    def draw(self, plain_probability: float) -> StepPlan:
        """Draws the plan of the next step, and counts the use of its operator.

        The operator is drawn uniformly, and so is the sparsity of a range. A plain step has none.
        """
        if self._forced is not None:
            return self._forced
        chance = torch.rand((), generator=self._generator) if plain_probability > 0 else 1
        if chance < plain_probability:
            return StepPlan(plain=True)
        if not self.operators:
            return StepPlan()
        index = int(torch.randint(len(self.operators), (), generator=self._generator))
        operator = self.operators[index]
        anew = self._uses[operator] % self.mask_interval == 0
        self._uses[operator] += 1
        return StepPlan(operator=operator, level=operator.draw(self._generator), anew=anew)

    def possible(self, plain_probability: float) -> list[StepPlan]:
        """Returns all plans that `draw` may return, provided that no operator is a range."""
        anew = (True,) if self.mask_interval == 1 else (True, False)
        plans = [
            StepPlan(operator=each, level=each, anew=a) for each in self.operators for a in anew
        ]
        plain = [StepPlan(plain=True)] if plain_probability > 0 else []
        return [*(plans or [StepPlan()]), *plain]

    @contextmanager
    def force(self, plan: StepPlan) -> Iterator[None]:
        """Makes `draw` return `plan` inside a `with` block, without counting any use."""
        self._forced = plan
        try:
            yield
        finally:
            self._forced = None

    @torch.no_grad()
    def compress_(self, plan: StepPlan, weights: Weights, *, at: int) -> Masks | None:
        """Replaces `weights` by C(weights); returns the masks, computed anew or reused.

        Args:
            plan: Plan of the step.
            weights: Weights to compress, in place.
            at: Number of passes left in the step; every pass of a rule keeps masks of its own.
        """
        if plan.operator is None or plan.level is None:
            return None
        kept = self._masks.get((plan.operator, at))
        if kept is not None and not plan.anew:
            plan.operator.recompress_(weights, kept)
            return kept
        masks = plan.level.compress_(weights)
        if self.mask_interval == 1 or masks is None:
            return masks
        if kept is None or kept.keys() != masks.keys():
            self._masks[plan.operator, at] = masks
            return masks
        # copied, so that they stay at the addresses that a captured graph reads
        torch._foreach_copy_(list(kept.values()), list(masks.values()))
        return kept

    def forget(self, operator: Operator | None) -> None:
        """Drops the masks of an operator, so that its next use computes new ones."""
        self._masks = {key: masks for key, masks in self._masks.items() if key[0] != operator}

    def forget_all(self) -> None:
        """Drops the masks of all operators."""
        self._masks = {}

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that later draws and masks depend on."""
        return {
            "generator": self._generator.get_state(),
            "uses": {str(operator): uses for operator, uses in self._uses.items()},
            "masks": [
                (str(operator), at, {name: pack_bits(mask) for name, mask in masks.items()})
                for (operator, at), masks in self._masks.items()
            ],
        }

    def read_state(self, state: object, weights: Weights) -> Callable[[], None]:
        """Checks a state and returns a function that loads it; nothing changes before it is called.

        Entries of operators that this sampler does not draw are ignored.

        Raises:
            ValueError: If the state is not one that `state_dict` returns.
        """
        try:
            generator, uses, masks = _checked(state, weights)
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError) as error:
            raise ValueError(f"the state is not one of this CrAM optimizer: {error}") from error
        known = {str(operator): operator for operator in self.operators}

        def load() -> None:
            self._generator.set_state(generator)
            self._uses = Counter({known[o]: count for o, count in uses.items() if o in known})
            self._masks = {
                (known[o], at): {name: unpack_bits(bits[name], weights[name]) for name in bits}
                for o, at, bits in masks
                if o in known
            }

        return load

    def load_state_dict(self, state: dict[str, Any], weights: Weights) -> None:
        """Loads `state`; see `read_state`."""
        self.read_state(state, weights)()

    def rewind(self, state: dict[str, Any], weights: Weights) -> None:
        """Goes back to an earlier `state`, but keeps the memory of masks that `state` lacks.

        CUDA graphs that are captured one after another may share memory for intermediate results,
        so masks that outlive a graph must not be allocated during its capture.
        """
        allocated = self._masks
        self.load_state_dict(state, weights)
        self._masks = {**allocated, **self._masks}


def _checked(
    state: Any,  # noqa: ANN401
    weights: Weights,
) -> tuple[Tensor, dict[str, int], list[tuple[str, int, dict[str, Tensor]]]]:
    """Returns generator, uses and masks of a state; raises any kind of error if one is invalid."""
    if not isinstance(state, dict):
        raise TypeError(f"a dictionary is needed, not {type(state).__name__}")
    generator = state["generator"].cpu()
    torch.Generator().set_state(generator)
    uses = dict(state["uses"])
    if not all(isinstance(o, str) and type(n) is int and n >= 0 for o, n in uses.items()):
        raise TypeError(f"uses must be counts by operator, got {uses}")
    names = state.get("weights", [])  # missing in states of version 0.1
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"weights must be a list of names, got {names!r}")
    masks = [(operator, at, dict(bits)) for operator, at, bits in state["masks"]]
    for operator, at, bits in masks:
        if not isinstance(operator, str) or type(at) is not int:
            raise TypeError(f"masks need an operator and a pass, got {operator!r} and {at!r}")
        for name, packed in bits.items():
            if packed.dtype != torch.uint8:
                raise TypeError(
                    f"mask of {operator} for {name!r} must be uint8, got {packed.dtype}"
                )
            if name not in weights or packed.shape != (-(-weights[name].numel() // 8),):
                raise ValueError(f"mask of {operator} for {name!r} fits no weight of the model")
    return generator, uses, masks


def pack_bits(mask: Tensor) -> Tensor:
    """Packs a mask into bytes, eight entries per byte."""
    flat = mask.detach().reshape(-1).to("cpu", torch.uint8)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, like: Tensor) -> Tensor:
    """Returns the mask that `pack_bits` packed, with the shape and device of `like`."""
    bits = (packed.cpu().unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    mask = torch.empty_like(like, dtype=torch.bool)
    return mask.copy_(bits.reshape(-1)[: like.numel()].view(like.shape).bool())
