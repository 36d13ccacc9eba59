"""Gradients taken out of `.grad`, combined, checked for NaN and infinity, and put back.

They travel as lists of (parameter, gradient): a step handles hundreds of them, and looking tensors
up in dictionaries would cost more than the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchcram.messages import list_names
from torchcram.sharding import norm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.sharding import ShardContext

Gradients = list[tuple["Tensor", "Tensor"]]


def gradients_of(parameters: Iterable[Tensor]) -> Gradients:
    """Returns the gradients that are there."""
    return [(p, grad) for p in parameters if (grad := p.grad) is not None]


def take_gradients(groups: Iterable[dict[str, Any]]) -> list[Gradients]:
    """Takes the gradients of every parameter group out of `.grad`, which is None afterwards."""
    taken = [gradients_of(group["params"]) for group in groups]
    if not any(taken):
        raise RuntimeError("there is no gradient at w: run backward before the compressed pass")
    for group in taken:
        for parameter, gradient in group:
            if gradient.is_sparse:
                shape = tuple(parameter.shape)
                raise ValueError(f"the gradient of a parameter of shape {shape} is a sparse tensor")
    # copies of views into a buffer that the next backward writes to, as DDP has them
    taken = [[(p, g.clone() if g._is_view() else g) for p, g in group] for group in taken]
    for group in taken:
        for parameter, _ in group:
            parameter.grad = None
    return taken


def put_gradients(gradients: Gradients) -> None:
    """Puts gradients into `.grad`."""
    for parameter, gradient in gradients:
        parameter.grad = gradient


def add_gradients(gradients: Gradients, shard_context: ShardContext) -> None:
    """Adds gradients to what `.grad` holds."""
    ours, theirs = [], []
    for parameter, gradient in gradients:
        second = parameter.grad
        if second is None:
            parameter.grad = gradient
        else:
            ours.append(second)
            theirs.append(gradient)
    ours, theirs = shard_context.here(ours), shard_context.here(theirs)
    pointers = [gradient.data_ptr() for gradient in theirs]
    for second, pointer in zip(ours, pointers, strict=True):
        if second.data_ptr() == pointer and pointer:
            shape = tuple(second.shape)
            raise RuntimeError(
                f"the second gradient of a parameter of shape {shape} was written over the first: "
                "let backward allocate it (zero_grad) instead of using a buffer again"
            )
    add_scaled_(ours, theirs, 1.0)


@torch.no_grad()
def add_scaled_(tensors: list[Tensor], others: list[Tensor], scale: float | Tensor) -> None:
    """Adds scale * others to `tensors`; a `scale` that is a tensor stays on its device."""
    if not tensors:
        return
    if isinstance(scale, float):
        torch._foreach_add_(tensors, others, alpha=scale)
        return
    by_device: dict[torch.device, tuple[list[Tensor], list[Tensor]]] = {}
    for tensor, other in zip(tensors, others, strict=True):
        ours, theirs = by_device.setdefault(other.device, ([], []))
        ours.append(tensor)
        theirs.append(other)
    for device, (ours, theirs) in by_device.items():
        torch._foreach_add_(ours, torch._foreach_mul(theirs, scale.to(device)))


def one_over(length: Tensor) -> Tensor:
    """Returns 1 / length, and 0 for a gradient of length 0."""
    return torch.where(length == 0, 0, 1 / length)


def clipping(length: Tensor, most: float) -> Tensor:
    """Returns what `clip_grad_norm_` multiplies a gradient by that is longer than `most`."""
    return (most / (length + 1e-6)).clamp(max=1)


def all_finite(gradients: Gradients, shard_context: ShardContext) -> bool:
    """Returns whether no gradient holds NaN or infinity; waits for the device."""
    return not bool(_by_norm(gradients, shard_context))


def carry_overflow(g: Gradients, *, into: Gradients, shard_context: ShardContext) -> None:
    """Makes `into` NaN where it does not hold `g` itself and `g` is not finite."""
    if not g:
        return
    bad = _by_norm(g, shard_context)
    for gradient in shard_context.here([gradient for _, gradient in into]):
        if gradient.numel():
            gradient.add_(torch.where(bad.to(gradient.device), torch.nan, 0.0))
            return


def raise_not_finite(
    gradients: Gradients, model: nn.Module, shard_context: ShardContext
) -> NoReturn:
    """Says which gradients are not finite, here or on another process."""
    here = shard_context.here([gradient for _, gradient in gradients])
    finite = [bool(torch.isfinite(gradient).all()) for gradient in here]
    bad = {id(p) for (p, _), good in zip(gradients, finite, strict=True) if not good}
    named = dict(model.named_parameters())
    flags = shard_context.any_of(torch.tensor([id(p) in bad for p in named.values()]))
    names = list_names(name for name, flag in zip(named, flags, strict=True) if flag)
    raise FloatingPointError(f"NaN or infinite gradient, no step taken; in: {names}")


def _by_norm(gradients: Gradients, shard_context: ShardContext) -> Tensor:
    """Returns whether a gradient holds NaN or infinity, on any process."""
    length = norm(shard_context.here([gradient for _, gradient in gradients]), torch.inf)
    return shard_context.any_of(torch.isfinite(length).logical_not())


def _any_not_finite(gradients: Gradients, shard_context: ShardContext) -> Tensor:
    """Returns 1.0 where `_by_norm` gives True, else 0.0, by the call that GradScaler uses.

    That call also multiplies, here by one; unlike norms, it takes next to no time of the host.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in shard_context.here([gradient for _, gradient in gradients]):
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    found = []
    for (device, _), group in alike.items():
        bad = torch.zeros((), device=device)
        one = torch.ones((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, bad, one)
        found.append(bad)
    first, *others = found
    for bad in others:
        first = torch.maximum(first, bad.to(first.device))
    return shard_context.any_of(first)


class NonFiniteGuard:
    """Steps a base optimizer with finite gradients only.

    Usually that means to look at a number on the device, hence to wait for it. The fused optimizers
    of torch can skip a step on the device (GradScaler makes use of that); there the host goes on,
    and learns of it one step later.
    """

    def __init__(
        self, base: Optimizer, shard_context: ShardContext, forget: Callable[[], None]
    ) -> None:
        self._base = base
        self._shard_context = shard_context
        self._forget = forget  # masks, which such gradients may have led to
        self._bad: Tensor | None = None  # 1.0 if the gradients at hand are not finite
        self._earlier: tuple[Tensor, torch.cuda.Event] | None = None  # that of the step before
        self._skipped: Tensor | None = None  # how many steps of CUDA graphs

    def reset(self) -> None:
        """Forgets about gradients seen so far."""
        self._bad = self._earlier = None

    def count_on_device(self, device: torch.device) -> None:
        """Gets ready for steps that are captured: the host cannot look at each of them."""
        if not getattr(self._base, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"a step of this {type(self._base).__name__} cannot be captured with "
                "check_finite=True, for which the host would have to wait: take a fused one"
            )
        self.reset()
        if self._skipped is None:  # graphs captured earlier add to the same count
            self._skipped = torch.zeros((), device=device)

    def raise_if_skipped(self) -> None:
        """Waits for the device; refuses if a captured step had to be left out."""
        if self._skipped is not None and (count := int(self._skipped)):
            self._skipped.zero_()
            raise FloatingPointError(f"NaN or infinite gradient: {count} step(s) not taken")

    def forget_pending(self) -> None:
        """Forgets about gradients that no step was taken with."""
        self._bad = None

    def check(self, gradients: Gradients) -> bool:
        """Returns False if `gradients` are not finite; True may be left for `step` to see."""
        skips = getattr(self._base, "_step_supports_amp_scaling", False)
        if not (skips and all(gradient.is_cuda for _, gradient in gradients)):
            return all_finite(gradients, self._shard_context)
        self._bad = _any_not_finite(gradients, self._shard_context)
        return True

    def step(self) -> None:
        """Takes a step of the base optimizer, unless the gradients looked at are not finite.

        Raises:
            FloatingPointError: if the step before this one had to be left out.
        """
        bad, self._bad = self._bad, None
        self._report()
        if bad is None:
            self._base.step()
            return
        self._base.grad_scale = None  # type: ignore[attr-defined]
        self._base.found_inf = bad  # type: ignore[attr-defined]
        try:
            self._base.step()
        finally:
            del self._base.grad_scale, self._base.found_inf  # type: ignore[attr-defined]
        if torch.cuda.is_current_stream_capturing():
            self._count(bad)
            return
        on_host = torch.empty((), pin_memory=True).copy_(bad, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(bad.device))
        self._earlier = (on_host, done)

    def _count(self, bad: Tensor) -> None:
        """Counts a step of a graph that is left out; the host cannot be told of each."""
        if self._skipped is None:
            raise RuntimeError(
                "a step that is captured by hand cannot be checked: capture it by "
                "torchcram.optim.graphs.GraphedStep, or take check_finite=False"
            )
        self._skipped.add_(bad)

    def _report(self) -> None:
        if self._earlier is None:
            return
        (bad, done), self._earlier = self._earlier, None
        done.synchronize()
        if bad:
            self._forget()
            raise FloatingPointError("NaN or infinite gradient: the step before this was not taken")
