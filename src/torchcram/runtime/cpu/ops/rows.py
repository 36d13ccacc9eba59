"""Functions of single rows: RMSNorm, and silu(gate) * up of gated feed-forward layers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from torchcram.kernels.cpu.library import kernels
from torchcram.runtime.cpu.ops.common import register, require_floats, require_rows


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    require_floats(x)
    require_rows("weight", weight, x.shape[-1])
    x = x.contiguous()
    y = torch.empty_like(x)
    width = x.shape[-1]
    kernels().torchcram_norm_rows(
        *(x.data_ptr(), x.numel() // max(width, 1), width, weight.data_ptr(), eps, y.data_ptr()),
        torch.get_num_threads(),
    )
    return y


def _fake_rms_norm(x: Tensor, _weight: Tensor, _eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _dense_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    require_floats(x)
    return functional.rms_norm(x, weight.shape, weight, eps)


def _silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    _require_same_shape(gate, up)
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    kernels().torchcram_gate_values(
        *(gate.data_ptr(), up.data_ptr(), gate.numel(), y.data_ptr()), torch.get_num_threads()
    )
    return y


def _fake_silu_and_mul(gate: Tensor, _up: Tensor) -> Tensor:
    return gate.new_empty(gate.shape)


def _dense_silu_and_mul(gate: Tensor, up: Tensor) -> Tensor:
    _require_same_shape(gate, up)
    return functional.silu(gate) * up


def _require_same_shape(gate: Tensor, up: Tensor) -> None:
    require_floats(gate)
    require_floats(up)
    if gate.shape != up.shape:
        shapes = f"{tuple(gate.shape)} and {tuple(up.shape)}"
        raise ValueError(f"gate and up must have the same shape, got {shapes}")


register(
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor",
    _rms_norm,
    fake=_fake_rms_norm,
    dense=_dense_rms_norm,
)
register(
    "silu_and_mul(Tensor gate, Tensor up) -> Tensor",
    _silu_and_mul,
    fake=_fake_silu_and_mul,
    dense=_dense_silu_and_mul,
)
