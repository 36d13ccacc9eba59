"""Stochastic Frank-Wolfe: every layer moves inside a ball whose vertices are sparse."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchcram.baselines.base import Baseline
from torchcram.baselines.scores import scalar_for
from torchcram.selection import keep_largest_each
from torchcram.weights import zero_unmasked_

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from torchcram.operators import Operator
    from torchcram.weights import Weights


class FrankWolfe(Baseline):
    """Base class: w <- w + eta (v - w) in every layer, with v the best vertex of a ball.

    ::

        m   <- momentum of g
        v    = argmin over the ball of <m, v>, which has K entries that are not zero
        eta  = min(lr_scale lr |m| / |v - w|, 1)

    The step has the length lr_scale lr |m|, as one of SGD would, unless eta is clipped. K is
    `fraction` of the weights of a layer. The vertices have the length tau = radius |w_0|, where
    w_0 are the weights of the layer when training begins (1 instead of |w_0| if that is zero).
    Weights that begin outside the ball move into it with the first steps.

    `base` trains the other parameters; the learning rates of its groups are those of the weights
    too, but neither its momentum nor its weight decay. One training serves all sparsities:
    `operator` is only what `finish` prunes to.

    Subclasses have the arguments in their docstrings, and their defaults as class attributes.

    Raises:
        ValueError: If an argument is not allowed, or weights are sharded.
    """

    fraction: float
    radius: float
    momentum: float
    lr_scale: float
    trains_to_target = False
    averages = False
    """Whether m is the average of the gradients, with weights momentum^t, rather than the sum."""

    def __init__(
        self,
        model: nn.Module,
        base: Optimizer,
        operator: Operator | str,
        *,
        fraction: float | None = None,
        radius: float | None = None,
        momentum: float | None = None,
        lr_scale: float | None = None,
        weights: Weights | None = None,
    ) -> None:
        self.fraction = self.fraction if fraction is None else fraction
        self.radius = self.radius if radius is None else radius
        self.momentum = self.momentum if momentum is None else momentum
        self.lr_scale = self.lr_scale if lr_scale is None else lr_scale
        if not 0 < self.fraction <= 1:
            raise ValueError(f"fraction must be in (0, 1], got {self.fraction}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be in [0, 1), got {self.momentum}")
        for name, value in (("radius", self.radius), ("lr_scale", self.lr_scale)):
            if not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a finite number above 0, got {value}")
        super().__init__(model, base, operator, weights=weights)
        self.require_whole()
        self._momenta = {
            name: torch.zeros_like(weight, requires_grad=False)
            for name, weight in self.weights.items()
        }
        self._radii = {name: self._radius_of(weight) for name, weight in self.weights.items()}
        # share of the gradient in an average
        self._share = scalar_for(self.weights)

    @abstractmethod
    def vertices(self, m: list[Tensor], masks: list[Tensor], tau: list[Tensor]) -> list[Tensor]:
        """Returns for every layer the vertex v of length tau that minimizes <m, v>.

        Args:
            m: Momenta of the gradients.
            masks: Masks of the K largest magnitudes of m.
            tau: Lengths of v.
        """

    def count(self, m: Tensor) -> int:
        """Returns the number K of entries of a vertex that are not zero, at least 1."""
        return max(int(self.fraction * m.numel()), 1)

    def set_step_numbers_(self) -> None:
        """Sets the share of the gradient in an average; the first m is g."""
        self._share.fill_(1 - self.momentum if self.steps else 1)

    def update_(self) -> None:
        """Steps `base` on the other parameters, then the weights towards their vertices."""
        with self._hidden_gradients():
            self.base.step()
        rates = {id(p): group["lr"] for group in self.param_groups for p in group["params"]}
        gradients = {
            name: weight.grad
            for name, weight in self.weights.items()
            if weight.grad is not None and id(weight) in rates
        }
        if not gradients:
            return
        weights = [self.weights[name] for name in gradients]
        momenta = [self._momenta[name] for name in gradients]
        for m, gradient in zip(momenta, gradients.values(), strict=True):
            if self.averages:
                m.lerp_(gradient, self._share.to(m))
            else:
                m.mul_(self.momentum).add_(gradient)
        masks = keep_largest_each(momenta, [self.count(m) for m in momenta])
        vertices = self.vertices(momenta, masks, [self._radii[name] for name in gradients])
        lengths = [
            self.lr_scale * rates[id(weight)] * length
            for weight, length in zip(weights, _norms(momenta), strict=True)
        ]
        gaps = _divisors(list(torch._foreach_sub(vertices, weights)))
        etas = torch._foreach_div(lengths, gaps)
        torch._foreach_clamp_max_(etas, 1)
        for weight, v, eta in zip(weights, vertices, etas, strict=True):
            weight.lerp_(v, eta.to(weight.dtype))  # w + eta (v - w)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the momenta m and the radii tau."""
        return {"momenta": self._momenta, "radii": self._radii}

    @torch.no_grad()
    def _radius_of(self, weight: Tensor) -> Tensor:
        (length,) = _norms([weight])
        return self.radius * torch.where(length > 0, length, 1)

    @contextmanager
    def _hidden_gradients(self) -> Iterator[None]:
        """Hides the gradients of the weights, so that `base` passes them over."""
        gradients = {name: weight.grad for name, weight in self.weights.items()}
        try:
            for weight in self.weights.values():
                weight.grad = None
            yield
        finally:
            for name, gradient in gradients.items():
                self.weights[name].grad = gradient


class SFW(FrankWolfe):
    """Frank-Wolfe in the K-sparse polytope, whose vertices have K entries of equal magnitude.

    ::

        m  <- momentum m + (1 - momentum) g
        v   = -tau / sqrt(K) sign(m) where |m| is among the K largest, else 0
        w  <- w + min(lr_scale lr |m| / |v - w|, 1) (v - w)

    Miao et al., "Learning pruning-friendly networks via Frank-Wolfe: one-shot, any-sparsity, and no
    retraining", ICLR 2022. The defaults are theirs: a learning rate of 1, which is 10 times the 0.1
    that is usual for SGD, because the momentum averages gradients instead of adding them up. Their
    learned initialization is not part of it.

    Args:
        model: Model to train.
        base: Optimizer of the other parameters.
        operator: Target of `finish`, such as "global:0.9".
        fraction: Fraction of the entries of v that are not zero, in (0, 1]; by default 0.05.
        radius: Length of v, as a multiple of the initial length of the weights of a layer; by
            default 15.
        momentum: Factor of the last m, in [0, 1); by default 0.9.
        lr_scale: Factor of the learning rate; by default 10.
        weights: Weights to train in balls and to prune; by default all
            `compressible_weights(model)`.

    Raises:
        ValueError: If an argument is not allowed, or weights are sharded.
    """

    averages = True
    fraction, radius, momentum, lr_scale = 0.05, 15.0, 0.9, 10.0

    def vertices(self, m: list[Tensor], masks: list[Tensor], tau: list[Tensor]) -> list[Tensor]:
        """Returns v = -tau / sqrt(K) sign(m) on the K largest."""
        v = list(torch._foreach_sign(m))
        zero_unmasked_(v, masks)
        torch._foreach_mul_(v, torch._foreach_div(tau, [-(self.count(each) ** 0.5) for each in m]))
        return v


class CompressionAwareSFW(FrankWolfe):
    """Frank-Wolfe in the ball of the K-support norm, whose vertices follow the gradient.

    ::

        m  <- momentum m + g
        v   = -tau m_K / |m_K|, with m_K the K largest magnitudes of m, 0 elsewhere
        w  <- w + min(lr_scale lr |m| / |v - w|, 1) (v - w)

    Zimmer et al., "Compression-aware training of neural networks using Frank-Wolfe", 2022. The
    momentum is that of SGD, and so are usual learning rates.

    Args:
        model: Model to train.
        base: Optimizer of the other parameters.
        operator: Target of `finish`, such as "global:0.9".
        fraction: Fraction of the entries of v that are not zero, in (0, 1]; by default 0.3.
        radius: Length of v, as a multiple of the initial length of the weights of a layer; by
            default 10.
        momentum: Factor of the last m, in [0, 1); by default 0.9.
        lr_scale: Factor of the learning rate; by default 1.
        weights: Weights to train in balls and to prune; by default all
            `compressible_weights(model)`.

    Raises:
        ValueError: If an argument is not allowed, or weights are sharded.
    """

    fraction, radius, momentum, lr_scale = 0.3, 10.0, 0.9, 1.0

    def vertices(self, m: list[Tensor], masks: list[Tensor], tau: list[Tensor]) -> list[Tensor]:
        """Returns v = -tau m_K / |m_K|."""
        v = list(torch._foreach_neg(m))
        zero_unmasked_(v, masks)
        torch._foreach_div_(v, _divisors(v))
        torch._foreach_mul_(v, tau)
        return v


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the Euclidean lengths of tensors, at least in float32."""
    dtypes = (tensor.dtype for tensor in tensors)
    widest = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return list(torch._foreach_norm(tensors, 2, dtype=widest))


def _divisors(tensors: list[Tensor]) -> list[Tensor]:
    """Returns the lengths of tensors to divide by: tiny ones instead of zero."""
    lengths = _norms(tensors)
    torch._foreach_clamp_min_(lengths, [torch.finfo(length.dtype).tiny for length in lengths])
    return lengths
