"""Sparse weights and comparisons that the tests of the runtime share."""

import torch

import torchcram


def sparse_weight(*shape, sparsity=0.7):
    return torch.randn(shape) * (torch.rand(shape) >= sparsity)


def sparse_model(model, operator="uniform:0.8"):
    return torchcram.compress(model, operator)


def relative_error(found, expected):
    """The largest difference, as a part of the largest expected value."""
    scale = expected.abs().max().clamp(min=1e-30)
    return ((found.double() - expected.double()).abs().max() / scale).item()
