"""Pruner, the base class of operators that look at data, and Calibration, the data it looks at."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.backends import cudnn

from torchcram.messages import list_names
from torchcram.operators import Chain, Operator, Sparsifier
from torchcram.operators.chain import join
from torchcram.passes import eval_mode, forward
from torchcram.sharding import is_sharded
from torchcram.weights import Weights, apply_masks_

if TYPE_CHECKING:
    from torchcram.weights import Masks


@dataclass(frozen=True)
class Pruner(Operator):
    """Operator that looks at data before it prunes; `bind` gives it a model and batches.

    Like all operators it is a value, and its text reads back as the same value: "obs@uniform:0.7",
    or with another number of recomputations "obs:r8@uniform:0.7".

    Attributes:
        kind: Name of the pruner.
        letters: Names of its options by the letters that stand for them in the text, which omits
            options with their default value.
        pattern: Sparsifier that selects by the scores of the pruner instead of by magnitude.
    """

    kind: ClassVar[str]
    letters: ClassVar[Mapping[str, str]] = {}
    pattern: Sparsifier

    def __post_init__(self) -> None:
        if not isinstance(self.pattern, Sparsifier):
            raise ValueError(
                f"{type(self).__name__}: {self.pattern!r} is no pattern; allowed are GlobalTopK, "
                "UniformTopK, RowTopK, NM and other Sparsifiers"
            )
        if self.pattern.is_range:
            raise ValueError(
                f"{type(self).__name__}: {self.pattern} is a range; a pruner needs one sparsity"
            )

    @abstractmethod
    def prune_(self, weights: Weights, calibration: Calibration) -> Masks:
        """Prunes `weights` of the model of `calibration` in place; returns the masks."""

    def compress_(self, weights: Weights) -> Masks:  # noqa: ARG002
        """Raises ValueError, because an unbound pruner has no data."""
        raise ValueError(
            f"{self} looks at data first: prune_(model, {str(self)!r}, batches), or compress_() "
            "with what bind() returns"
        )

    def __str__(self) -> str:
        options = "".join(
            f":{letter}{getattr(self, option)!r}".replace("+", "")  # 1e+20: "+" joins operators
            for letter, option in self.letters.items()
            if getattr(self, option) != getattr(type(self), option)
        )
        return f"{self.kind}{options}@{self.pattern}"


@dataclass(frozen=True, eq=False)
class BoundPruner(Operator):
    """Pruner with the data it looks at, ready for `compress_`, which prunes all weights or none.

    Attributes:
        pruner: Pruner without data.
        calibration: Batches, and the model, whose weights are the only ones it can compress.
    """

    pruner: Pruner
    calibration: Calibration

    @torch.no_grad()
    def compress_(self, weights: Weights) -> Masks:
        """Looks at the data, then prunes; after an error the weights are unchanged."""
        self._check(weights)
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        device = next(iter(weights.values())).device.type if weights else "cpu"
        try:
            with torch.autocast(device, enabled=False):  # F and H are sums in float32
                masks = self.pruner.prune_(weights, self.calibration)
            _require_finite(self.pruner, weights)
        except BaseException:
            for name, weight in weights.items():
                weight.copy_(before[name])
            raise
        return masks

    def recompress_(self, weights: Weights, masks: Masks) -> None:
        """Zeroes the weights that `masks` do not keep."""
        apply_masks_(weights, masks)

    def _check(self, weights: Weights) -> None:
        """Raises ValueError unless `weights` are whole, finite and part of the model."""
        here = {id(parameter) for parameter in self.calibration.model.parameters()}
        for name, weight in weights.items():
            if is_sharded(weight) or getattr(weights, "parts", {}).get(name) is not None:
                raise ValueError(f"{self}: {name!r} is sharded; pruners need whole weights")
            if id(weight) not in here:
                raise ValueError(
                    f"{self} is bound to another model: {name!r} is no parameter of it (a copy is "
                    "another model: copy first, then prune_ the copy)"
                )
        _require_finite(self.pruner, weights)

    def __str__(self) -> str:
        return str(self.pruner)


def bind(
    operator: Operator, model: nn.Module, batches: Iterable[Any], *, loss: Loss | None = None
) -> Operator:
    """Gives every pruner in `operator` the data it looks at; other operators stay as they are.

    Args:
        operator: Pruner, chain that contains pruners, or any other operator.
        model: Model that will be compressed.
        batches: List or loader of batches of any kind that `loss` accepts.
        loss: Function `loss(model, batch) -> Tensor`, needed by `Obs`. Without it a batch is the
            inputs, a tuple that begins with them, or a mapping of keyword arguments.
    """
    if isinstance(operator, Chain):
        return join([bind(part, model, batches, loss=loss) for part in operator.parts])
    if isinstance(operator, Pruner):
        return BoundPruner(operator, Calibration(model, batches, loss))
    return operator


def require_damping(pruner: Pruner, damping: float) -> None:
    """Raises ValueError unless `damping` is a positive number."""
    if isinstance(damping, bool) or not 0 < damping < math.inf:
        raise ValueError(
            f"{type(pruner).__name__}: damping is {damping!r}, allowed are numbers above 0"
        )


def _require_finite(pruner: Pruner, weights: Weights) -> None:
    bad = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    if bad:
        raise ValueError(f"{pruner}: not all weights are finite in: {list_names(bad)}")


Loss = Callable[[nn.Module, Any], Tensor]
"""Function that runs the model on one batch and returns the loss, a single number."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Batches for a model, on which it runs in eval mode, so that nothing else changes.

    Attributes:
        model: Model that is pruned.
        batches: List or loader of batches, not an iterator: it is read several times.
        loss: Function `loss(model, batch)`, or None if no gradient is needed. Batches are then
            inputs, or tuples that begin with the inputs, or mappings of keyword arguments, and are
            moved to the device of the model.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator) or not isinstance(self.batches, Iterable):
            raise ValueError(
                f"batches is a {type(self.batches).__name__}, but is read several times: allowed "
                "are lists, loaders and whatever else starts again at every iter()"
            )

    @torch.no_grad()
    def run(self, batches: Iterable[Any] | None = None) -> int:
        """Runs the model on all batches, or on some others; returns their number.

        Raises:
            ValueError: If there is no batch.
        """
        count = 0
        torch.clear_autocast_cache()  # it may hold copies of earlier weights
        with eval_mode(self.model):
            for batch in self.batches if batches is None else batches:
                count += 1
                if self.loss is None:
                    forward(self.model, batch)
                else:
                    self.loss(self.model, batch)
        if not count:
            raise ValueError("pruning needs at least one batch to look at, and got none")
        return count

    def differentiate(
        self, weights: Weights, count: int, use: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Calls `use` with the gradients of `weights` on each of the first `count` batches.

        The gradients of a batch omit weights that the batch does not use. `.grad` is not changed.

        Raises:
            ValueError: If there are fewer batches, or a weight gets no gradient on any of them.
        """
        if self.loss is None:
            raise ValueError("gradients need a loss: loss(model, batch) -> Tensor, and got None")
        done = 0
        reached: set[str] = set()
        torch.clear_autocast_cache()
        with eval_mode(self.model), _requiring_gradients(weights), _differentiable(self.model):
            for batch in islice(self.batches, count):
                gradients = self._gradients(self.loss, weights, batch)
                reached.update(gradients)
                done += 1
                use(gradients)
        if done < count:
            raise ValueError(
                f"{count} gradients need as many batches, and there are {done}: give more batches "
                "(smaller ones), or ask for fewer gradients"
            )
        if missed := [name for name in weights if name not in reached]:
            raise ValueError(f"no gradient of any batch reaches: {list_names(missed)}")

    def _gradients(self, loss: Loss, weights: Weights, batch: object) -> dict[str, Tensor]:
        with torch.enable_grad():
            value = loss(self.model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError("loss(model, batch) must return one number with a gradient")
            values = list(weights.values())
            gradients = torch.autograd.grad(value.sum(), values, allow_unused=True)
        return {
            name: gradient
            for name, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
        }


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Disables cuDNN if there are recurrent layers, which it cannot differentiate in eval mode."""
    before = cudnn.enabled
    if not any(isinstance(module, nn.RNNBase) for module in model.modules()):
        yield
        return
    try:
        cudnn.enabled = False
        yield
    finally:
        cudnn.enabled = before


@contextmanager
def _requiring_gradients(weights: Weights) -> Iterator[None]:
    frozen = [weight for weight in weights.values() if not weight.requires_grad]
    try:
        for weight in frozen:
            weight.requires_grad_(True)
        yield
    finally:
        for weight in frozen:
            weight.requires_grad_(False)
