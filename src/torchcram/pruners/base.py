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

from torchcram.compress import compress_
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
    """An operator that looks at data before it decides; `bind` gives it a model and batches.

    It is a value, as all operators are; text and value are inverse: "obs@uniform:0.7", and with
    another number of recomputations "obs:r8@uniform:0.7".

    Attributes:
        kind: the name of the pruner.
        letters: of its options, by which the text has them where they are not the default.
        pattern: chooses what to keep, by the scores of the pruner in place of the magnitudes.
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
        """Prunes `weights` of the model of `calibration` in place; returns what is kept."""

    def compress_(self, weights: Weights) -> Masks:  # noqa: ARG002
        """Refuses: there is no data yet."""
        raise ValueError(
            f"{self} looks at data first: prune_(model, {str(self)!r}, batches), or compress_() "
            "with what bind() returns"
        )

    def __str__(self) -> str:
        told = "".join(
            f":{letter}{getattr(self, option)!r}".replace("+", "")  # 1e+20: "+" joins operators
            for letter, option in self.letters.items()
            if getattr(self, option) != getattr(type(self), option)
        )
        return f"{self.kind}{told}@{self.pattern}"


@dataclass(frozen=True, eq=False)
class BoundPruner(Operator):
    """A pruner with the data it looks at, ready for `compress_`; all or nothing.

    Attributes:
        pruner: the value.
        calibration: the model, whose weights alone it can compress, and the batches.
    """

    pruner: Pruner
    calibration: Calibration

    @torch.no_grad()
    def compress_(self, weights: Weights) -> Masks:
        """Looks at the data, then prunes; on an error the weights are what they were."""
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
        """Zeroes what `masks` do not keep."""
        apply_masks_(weights, masks)

    def _check(self, weights: Weights) -> None:
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
        operator: a pruner, a chain with pruners in it, or any other.
        model: what will be compressed.
        batches: a list or a loader; what a batch is, only `loss` has to know.
        loss: `loss(model, batch) -> Tensor`; needed by `Obs`. Without it a batch is the inputs, a
            tuple that begins with them, or a mapping of keyword arguments.
    """
    if isinstance(operator, Chain):
        return join([bind(part, model, batches, loss=loss) for part in operator.parts])
    if isinstance(operator, Pruner):
        return BoundPruner(operator, Calibration(model, batches, loss))
    return operator


def prune_(
    model: nn.Module,
    operator: Operator | str,
    batches: Iterable[Any],
    *,
    loss: Loss | None = None,
    weights: Weights | None = None,
) -> Masks | None:
    """Compresses `model` in place by an operator that may look at data; returns the masks.

    Args:
        model: any module, in any mode; modes, gradients and running statistics stay as they are.
        operator: a pruner, or any other operator, or text such as "obs@uniform:0.7+int8".
        batches: as for `bind`.
        loss: as for `bind`.
        weights: what to compress; by default all `compressible_weights(model)`.
    """
    if isinstance(operator, str):
        from torchcram.pruners.parse import parse_pruner

        operator = parse_pruner(operator)
    return compress_(model, bind(operator, model, batches, loss=loss), weights=weights)


def require_damping(pruner: Pruner, damping: float) -> None:
    """Raises ValueError where `damping` is no positive number."""
    if isinstance(damping, bool) or not 0 < damping < math.inf:
        raise ValueError(
            f"{type(pruner).__name__}: damping is {damping!r}, allowed is what is above 0"
        )


def _require_finite(pruner: Pruner, weights: Weights) -> None:
    found = [name for name, weight in weights.items() if not bool(weight.isfinite().all())]
    if found:
        raise ValueError(f"{pruner}: not all weights are finite in: {list_names(found)}")


Loss = Callable[[nn.Module, Any], Tensor]
"""Runs the model on one batch and returns the loss, one number."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Batches for a model, and how it runs on them: in eval mode, so that nothing else changes.

    Attributes:
        model: what is pruned.
        batches: gone through several times, so a list or a loader and no iterator.
        loss: `loss(model, batch)`. None where no gradient is needed: batches are then inputs, or
            tuples that begin with the inputs, or mappings of keyword arguments, and are moved to
            the device of the model.
    """

    model: nn.Module
    batches: Iterable[Any]
    loss: Loss | None = None

    def __post_init__(self) -> None:
        if isinstance(self.batches, Iterator) or not isinstance(self.batches, Iterable):
            raise ValueError(
                f"batches is a {type(self.batches).__name__}, but is gone through several times: "
                "allowed are lists, loaders and whatever else begins anew at every iter()"
            )

    @torch.no_grad()
    def run(self) -> None:
        """Runs the model on all batches.

        Raises:
            ValueError: if there is none.
        """
        count = 0
        torch.clear_autocast_cache()  # which may hold the weights as they were before
        with eval_mode(self.model):
            for count, batch in enumerate(self.batches, 1):  # noqa: B007
                if self.loss is None:
                    forward(self.model, batch)
                else:
                    self.loss(self.model, batch)
        if not count:
            raise ValueError("pruning needs at least one batch to look at, and got none")

    def differentiate(
        self, weights: Weights, count: int, use: Callable[[dict[str, Tensor]], None]
    ) -> None:
        """Hands the gradients of `weights` on each of the first `count` batches to `use`.

        A weight that a batch does not reach is left out of that one. `.grad` is not touched.

        Raises:
            ValueError: if there are fewer batches, or a weight is reached by none of them.
        """
        if self.loss is None:
            raise ValueError("gradients need a loss: loss(model, batch) -> Tensor, and got None")
        done = 0
        reached: set[str] = set()
        torch.clear_autocast_cache()
        with eval_mode(self.model), _requiring_gradients(weights), _differentiable(self.model):
            for batch in islice(self.batches, count):
                found = self._gradients(self.loss, weights, batch)
                reached.update(found)
                done += 1
                use(found)
        if done < count:
            raise ValueError(
                f"{count} gradients need as many batches, and there are {done}: give more batches "
                "(smaller ones), or ask for fewer gradients"
            )
        if missed := [name for name in weights if name not in reached]:
            raise ValueError(f"no gradient reaches, on any batch: {list_names(missed)}")

    def _gradients(self, loss: Loss, weights: Weights, batch: object) -> dict[str, Tensor]:
        with torch.enable_grad():
            value = loss(self.model, batch)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise ValueError("loss(model, batch) must return one number with a gradient")
            found = torch.autograd.grad(value.sum(), list(weights.values()), allow_unused=True)
        return {
            name: gradient
            for name, gradient in zip(weights, found, strict=True)
            if gradient is not None
        }


@contextmanager
def _differentiable(model: nn.Module) -> Iterator[None]:
    """Leaves cuDNN aside where there are recurrent layers: it has no gradients in eval mode."""
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
