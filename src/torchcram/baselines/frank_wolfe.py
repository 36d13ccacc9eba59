"""Stochastic Frank-Wolfe: every layer moves inside a ball whose vertices are sparse."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from torchcram.baselines.base import Baseline
from torchcram.baselines.scores import scalar_for
from torchcram.selection import keep_largest_each

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
    def vertex(self, m: Tensor, mask: Tensor, tau: Tensor) -> Tensor:
        """Returns the vertex v of length tau that minimizes <m, v>.

        Args:
            m: Momentum of the gradient of a layer.
            mask: Mask of the K largest magnitudes of m.
            tau: Length of v.
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
        for name, gradient in gradients.items():
            m = self._momenta[name]
            if self.averages:
                m.lerp_(gradient, self._share.to(m))
            else:
                m.mul_(self.momentum).add_(gradient)
        momenta = [self._momenta[name] for name in gradients]
        masks = keep_largest_each(momenta, [self.count(m) for m in momenta])
        for name, mask in zip(gradients, masks, strict=True):
            weight, m = self.weights[name], self._momenta[name]
            v = self.vertex(m, mask, self._radii[name])
            length = self.lr_scale * rates[id(weight)] * _norm(m)
            gap = _norm(v - weight).clamp(min=torch.finfo(length.dtype).tiny)
            weight.lerp_(v, (length / gap).clamp(max=1).to(weight.dtype))  # w + eta (v - w)

    def tensors(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Returns the momenta m and the radii tau."""
        return {"momenta": self._momenta, "radii": self._radii}

    @torch.no_grad()
    def _radius_of(self, weight: Tensor) -> Tensor:
        length = _norm(weight)
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

    def vertex(self, m: Tensor, mask: Tensor, tau: Tensor) -> Tensor:
        """Returns v = -tau / sqrt(K) sign(m) on the K largest."""
        return m.sign().masked_fill_(mask.logical_not(), 0).mul_(-tau / self.count(m) ** 0.5)


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

    def vertex(self, m: Tensor, mask: Tensor, tau: Tensor) -> Tensor:
        """Returns v = -tau m_K / |m_K|."""
        largest = m.masked_fill(mask.logical_not(), 0)
        length = _norm(largest)
        return largest.div_(length.clamp(min=torch.finfo(length.dtype).tiny)).mul_(-tau)


def _norm(tensor: Tensor) -> Tensor:
    """Returns the Euclidean length of a tensor, at least in float32."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    length: Tensor = torch.linalg.vector_norm(tensor, dtype=dtype)
    return length
