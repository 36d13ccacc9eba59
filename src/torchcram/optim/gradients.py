"""Gradients: taken out of `.grad`, combined, checked for NaN and infinity, and put back.

They are lists of (parameter, gradient) rather than dictionaries: a step handles hundreds of them,
and looking tensors up would cost more than the arithmetic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch

from torchcram.messages import list_names
from torchcram.sharding import norm
from torchcram.weights import cuda_kernels, mask_gradients_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.layers import Masks, Weights
    from torchcram.sharding import ShardContext

Gradients = list[tuple["Tensor", "Tensor"]]


def gradients_of(parameters: Iterable[Tensor]) -> Gradients:
    """Returns the gradients of those parameters that have one."""
    return [(p, grad) for p in parameters if (grad := p.grad) is not None]


def take_gradients(groups: Iterable[dict[str, Any]]) -> list[Gradients]:
    """Takes the gradients of every parameter group out of `.grad`, which is None afterwards.

    Raises:
        RuntimeError: If no parameter has a gradient.
        ValueError: If a gradient is a sparse tensor.
    """
    taken = [gradients_of(group["params"]) for group in groups]
    if not any(taken):
        raise RuntimeError("there is no gradient at w: run backward before the compressed pass")
    for group in taken:
        for parameter, gradient in group:
            if gradient.is_sparse:
                shape = tuple(parameter.shape)
                raise ValueError(f"the gradient of a parameter of shape {shape} is a sparse tensor")
    # views, as DDP makes them, are copied: the next backward writes to their buffer
    taken = [[(p, g.clone() if g._is_view() else g) for p, g in group] for group in taken]
    for group in taken:
        for parameter, _ in group:
            parameter.grad = None
    return taken


def put_gradients(gradients: Gradients) -> None:
    """Puts gradients into `.grad`."""
    for parameter, gradient in gradients:
        parameter.grad = gradient


def add_to_masked(
    g: Gradients,
    parameters: Iterable[Tensor],
    weights: Weights,
    masks: Masks,
    shard_context: ShardContext,
) -> Tensor | None:
    """Replaces the gradients in `.grad` by M * gradient + g.

    Args:
        g: Gradients to add.
        parameters: All parameters that are trained.
        weights: Weights that `masks` belong to.
        masks: Masks M by the names of weights; gradients without one are kept as a whole.
        shard_context: Sharding of the parameters.

    Returns:
        Flag on the device, 1.0 if a gradient is now NaN or infinite, where a kernel of CUDA has
        done all in one pass over the gradients; None otherwise, and for shards.

    Raises:
        RuntimeError: If g shares memory with the gradients in `.grad`, which have overwritten it.
    """
    at_once = not shard_context.sharded
    bad = _add_to_masked_at_once(g, parameters, weights, masks) if at_once else None
    if bad is None:
        mask_gradients_(weights, masks)
        add_gradients(g, shard_context)
    return bad


def _add_to_masked_at_once(
    g: Gradients, parameters: Iterable[Tensor], weights: Weights, masks: Masks
) -> Tensor | None:
    """Does the same with a kernel of CUDA; returns None if there is none for these gradients."""
    kernels = cuda_kernels()
    if kernels is None:
        return None
    present = gradients_of(parameters)
    numbers = [id(parameter) for parameter, _ in present]
    kept = {id(w): mask for name, mask in masks.items() if (w := weights[name]).grad is not None}
    if numbers != [id(parameter) for parameter, _ in g] or not kept.keys() <= {*numbers}:
        return None
    ours = [gradient for _, gradient in present]
    theirs = [gradient for _, gradient in g]
    in_order = [kept.get(number) for number in numbers]
    if not kernels.can_combine(ours, theirs, in_order):
        return None
    _require_separate(ours, theirs)
    bad = torch.zeros((), device=ours[0].device)
    kernels.combine_(ours, theirs, in_order, bad)
    return bad


def add_gradients(gradients: Gradients, shard_context: ShardContext) -> None:
    """Adds gradients to those in `.grad`.

    Raises:
        RuntimeError: If both share memory, so that the second has overwritten the first.
    """
    ours, theirs = [], []
    for parameter, gradient in gradients:
        second = parameter.grad
        if second is None:
            parameter.grad = gradient
        else:
            ours.append(second)
            theirs.append(gradient)
    ours, theirs = shard_context.local(ours), shard_context.local(theirs)
    _require_separate(ours, theirs)
    add_scaled_(ours, theirs, 1.0)


def _require_separate(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Raises RuntimeError if two gradients of a parameter share memory."""
    pointers = [gradient.data_ptr() for gradient in theirs]
    for second, pointer in zip(ours, pointers, strict=True):
        if second.data_ptr() == pointer and pointer:
            shape = tuple(second.shape)
            raise RuntimeError(
                f"the second gradient of a parameter of shape {shape} was written over the first: "
                "let backward allocate it (zero_grad) instead of reusing a buffer"
            )


@torch.no_grad()
def add_scaled_(tensors: list[Tensor], others: list[Tensor], scale: float | Tensor) -> None:
    """Adds scale * others to `tensors`; no device waits for the value of a tensor `scale`."""
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
    kernels = cuda_kernels()
    for device, (ours, theirs) in by_device.items():
        here = scale.to(device)
        if kernels is not None and kernels.can_add_scaled(ours, theirs, here):
            kernels.add_scaled_(ours, theirs, here)
        else:
            torch._foreach_add_(ours, torch._foreach_mul(theirs, here))


def one_over(length: Tensor) -> Tensor:
    """Returns 1 / length, or 0 if the length is 0."""
    return torch.where(length == 0, 0, 1 / length)


def clipping(length: Tensor, max_norm: float) -> Tensor:
    """Returns the factor by which `clip_grad_norm_` multiplies a gradient of this length."""
    return (max_norm / (length + 1e-6)).clamp(max=1)


def all_finite(gradients: Gradients, shard_context: ShardContext) -> bool:
    """Returns whether all gradients are free of NaN and infinity; waits for the device."""
    return not bool(_by_norm(gradients, shard_context))


def carry_overflow(g: Gradients, *, into: Gradients, shard_context: ShardContext) -> None:
    """Writes NaN into `into` if `g` is not finite, so that a GradScaler notices it there."""
    if not g:
        return
    bad = _by_norm(g, shard_context)
    for gradient in shard_context.local([gradient for _, gradient in into]):
        if gradient.numel():
            gradient.add_(torch.where(bad.to(gradient.device), torch.nan, 0.0))
            return


def raise_not_finite(
    gradients: Gradients, model: nn.Module, shard_context: ShardContext
) -> NoReturn:
    """Raises FloatingPointError that names the gradients with NaN or infinity on any rank."""
    local = shard_context.local([gradient for _, gradient in gradients])
    finite = [bool(torch.isfinite(gradient).all()) for gradient in local]
    bad = {id(p) for (p, _), good in zip(gradients, finite, strict=True) if not good}
    named = dict(model.named_parameters())
    flags = shard_context.any_of(torch.tensor([id(p) in bad for p in named.values()]))
    names = list_names(name for name, flag in zip(named, flags, strict=True) if flag)
    raise FloatingPointError(f"NaN or infinite gradient, no step taken; in: {names}")


def _by_norm(gradients: Gradients, shard_context: ShardContext) -> Tensor:
    """Returns whether a gradient holds NaN or infinity on any rank."""
    length = norm(shard_context.local([gradient for _, gradient in gradients]), torch.inf)
    return shard_context.any_of(torch.isfinite(length).logical_not())


def _any_not_finite(gradients: Gradients, shard_context: ShardContext) -> Tensor:
    """Returns 1.0 if a gradient holds NaN or infinity on any rank, otherwise 0.0.

    The function of torch called here is the one that GradScaler uses. It also multiplies, here by
    1; unlike norms, it takes next to no time on the host.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in shard_context.local([gradient for _, gradient in gradients]):
        alike.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    flags = []
    for (device, _), group in alike.items():
        bad = torch.zeros((), device=device)
        scale = torch.ones((), device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, bad, scale)
        flags.append(bad)
    first, *others = flags
    for bad in others:
        first = torch.maximum(first, bad.to(first.device))
    return shard_context.any_of(first)


class NonFiniteGuard:
    """Steps a base optimizer only if the gradients are finite.

    Usually the host has to wait for the device to find out. The fused optimizers of torch can skip
    a step on the device, as GradScaler makes them do: then the host goes on, and raises the error
    one step later.

    Args:
        base: Base optimizer.
        shard_context: Sharding of the parameters.
        forget: Function that drops all masks, called after a skipped step because non-finite
            gradients may have led to them.
    """

    def __init__(
        self, base: Optimizer, shard_context: ShardContext, forget: Callable[[], None]
    ) -> None:
        self._base = base
        self._shard_context = shard_context
        self._forget = forget
        self._bad: Tensor | None = None  # 1.0 if the gradients for the next step are not finite
        self._earlier: tuple[Tensor, torch.cuda.Event] | None = (
            None  # the flag of the previous step
        )
        self._skipped: Tensor | None = None  # number of skipped steps in CUDA graphs

    def reset(self) -> None:
        """Forgets all gradients seen so far."""
        self._bad = self._earlier = None

    def count_on_device(self, device: torch.device) -> None:
        """Prepares for steps in CUDA graphs, whose skipped steps are counted on the device.

        Raises:
            ValueError: If the base optimizer cannot skip steps on the device.
        """
        if not getattr(self._base, "_step_supports_amp_scaling", False):
            raise ValueError(
                f"a step of this {type(self._base).__name__} cannot be captured with "
                "check_finite=True, for which the host would have to wait: use a fused optimizer"
            )
        self.reset()
        if self._skipped is None:  # graphs captured earlier add to the same count
            self._skipped = torch.zeros((), device=device)

    def raise_if_skipped(self) -> None:
        """Waits for the device; raises FloatingPointError if a step was skipped there."""
        self._report()
        if self._skipped is not None and (count := int(self._skipped)):
            self._skipped.zero_()
            raise FloatingPointError(f"NaN or infinite gradient: {count} step(s) not taken")

    def forget_pending(self) -> None:
        """Forgets the gradients that were checked for the next step."""
        self._bad = None

    def check(self, gradients: Gradients, bad: Tensor | None = None) -> bool:
        """Returns False if `gradients` are not finite; with a fused optimizer, `step` finds out.

        Args:
            gradients: Gradients that the step depends on.
            bad: Flag on the device, 1.0 if they are not finite; None if that is not known yet.
        """
        skips = getattr(self._base, "_step_supports_amp_scaling", False)
        if not (skips and all(gradient.is_cuda for _, gradient in gradients)):
            return all_finite(gradients, self._shard_context) if bad is None else not bool(bad)
        self._bad = _any_not_finite(gradients, self._shard_context) if bad is None else bad
        return True

    def step(self) -> None:
        """Takes a step of the base optimizer, unless the checked gradients are not finite.

        Raises:
            FloatingPointError: If the previous step was skipped.
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
        """Counts a skipped step of a CUDA graph on the device."""
        if self._skipped is None:
            raise RuntimeError(
                "a step that is captured by hand cannot be checked: capture it with "
                "torchcram.GraphedStep, or set check_finite=False"
            )
        self._skipped.add_(bad)

    def _report(self) -> None:
        """Raises FloatingPointError if the previous step was skipped on the device."""
        if self._earlier is None:
            return
        (bad, done), self._earlier = self._earlier, None
        done.synchronize()
        if bad:
            self._forget()
            raise FloatingPointError("NaN or infinite gradient: the step before this was not taken")
