"""Gradients that are not finite do not reach the weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from torchcram.optim.gradients import Gradients, norm

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer


def all_finite(gradients: Gradients) -> bool:
    """Returns whether no gradient holds NaN or infinity; waits for the device."""
    return bool(torch.isfinite(norm([gradient for _, gradient in gradients], torch.inf)))


def carry_overflow(g: Gradients, into: Gradients) -> None:
    """Makes `into` NaN where it does not hold `g` itself and `g` is not finite."""
    if g and into:
        into[0][1].add_(norm([gradient for _, gradient in g], torch.inf) * 0)  # NaN, or 0


def raise_not_finite(gradients: Gradients, model: nn.Module) -> NoReturn:
    """Says which gradients are not finite."""
    bad = {id(p) for p, gradient in gradients if not bool(torch.isfinite(gradient).all())}
    names = ", ".join(name for name, p in model.named_parameters() if id(p) in bad)
    raise FloatingPointError(f"NaN or infinite gradient, no step taken; in: {names}")


def _any_not_finite(gradients: Gradients) -> Tensor:
    """Returns 1.0 if a gradient holds NaN or infinity, else 0.0, by the call that GradScaler uses.

    That call also multiplies, here by one; unlike norms, it takes next to no time of the host.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for _, gradient in gradients:
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
    return first


class FiniteGuard:
    """Steps a base optimizer with finite gradients only.

    Usually that means to look at a number on the device, hence to wait for it. The fused optimizers
    of torch can skip a step on the device (GradScaler makes use of that); there the host goes on,
    and learns of it one step later.
    """

    def __init__(self, base: Optimizer) -> None:
        self._base = base
        self._bad: Tensor | None = None  # 1.0 if the gradients at hand are not finite
        self._earlier: tuple[Tensor, torch.cuda.Event] | None = None  # that of the step before
        self._left_out: Tensor | None = None  # how many steps of CUDA graphs

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
        self._left_out = torch.zeros((), device=device)

    def raise_if_left_out(self) -> None:
        """Waits for the device; refuses if a captured step had to be left out."""
        if self._left_out is not None and (count := int(self._left_out)):
            self._left_out.zero_()
            raise FloatingPointError(f"NaN or infinite gradient: {count} step(s) not taken")

    def forget_pending(self) -> None:
        """Forgets about gradients that no step was taken with."""
        self._bad = None

    def admits(self, gradients: Gradients) -> bool:
        """Returns False if `gradients` are not finite; True may be left for `step` to see."""
        skips = getattr(self._base, "_step_supports_amp_scaling", False)
        if not (skips and all(gradient.is_cuda for _, gradient in gradients)):
            return all_finite(gradients)
        self._bad = _any_not_finite(gradients)
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
        if self._left_out is not None and torch.cuda.is_current_stream_capturing():
            self._left_out.add_(bad)
            return
        on_host = torch.empty((), pin_memory=True).copy_(bad, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(bad.device))
        self._earlier = (on_host, done)

    def _report(self) -> None:
        if self._earlier is None:
            return
        (bad, done), self._earlier = self._earlier, None
        done.synchronize()
        if bad:
            raise FloatingPointError("NaN or infinite gradient: the step before this was not taken")
