"""Matrices for products with one to four vectors: bit masks and the values that are not zero."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from torchcram.kernels.cpu.library import kernels

MOST_VECTORS = 4
"""Number of vectors that a product takes at most; kMostSequences in packed.h."""

_BITS = 64  # inputs per mask
_SLACK = 64  # bytes that the kernels may read beyond the last value
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_DENSE = {torch.float32: 0.97, torch.bfloat16: 0.94, torch.int8: 0.88}
"""Fraction of weights that are not zero above which masks would take more room than zeros."""


class RowMatrixStruct(ctypes.Structure):
    """`RowMatrix` in packed.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("masks", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class RowLinear(nn.Module):
    """A Linear layer for a few tokens at a time, whose weight is read once per call.

    Args:
        weight: Weight (outputs, inputs).
        bias: Bias of the outputs, or None.
        dtype: Type of the values: torch.float32, torch.bfloat16, or torch.int8 with a scale for
            every output. With int8, the activations are rounded to 8 bits as well, with a scale for
            every 64, where the machine has instructions for that.

    Raises:
        ValueError: If the type is another, or a weight is not finite.
    """

    values: Tensor
    starts: Tensor
    masks: Tensor | None
    scales: Tensor | None
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in _KINDS:
            allowed = ", ".join(map(str, _KINDS))
            raise ValueError(f"dtype must be one of {allowed}, got {dtype}")
        weight = weight.detach().to("cpu", torch.float32)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("a weight is NaN or infinite and cannot be packed")
        self.out_features, self.in_features = weight.shape
        self.dtype = dtype
        weight, scales = _rounded(weight, dtype)
        rows = nn.functional.pad(weight, (0, -self.in_features % _BITS))
        kept = rows != 0
        masks = None
        if int(kept.sum()) <= _DENSE[dtype] * weight.numel():
            masks = _packed_bits(kept)
            values, counts = rows[kept].to(dtype), kept.sum(1)
        else:
            values, counts = rows.to(dtype).flatten(), torch.full((len(rows),), rows.shape[1])
        starts = (counts.cumsum(0) - counts) * dtype.itemsize
        self.register_buffer("values", _with_slack(values))
        self.register_buffer("starts", starts)
        self.register_buffer("masks", masks)
        self.register_buffer("scales", scales)
        self.register_buffer("bias", None if bias is None else bias.detach().float().clone())
        self.eval()

    @property
    def nbytes(self) -> int:
        """Number of bytes that a product reads."""
        return sum(buffer.nbytes for buffer in self.buffers())

    def struct(self) -> RowMatrixStruct:
        """Returns the description of the matrix for the kernels; it holds addresses only."""
        return RowMatrixStruct(
            self.out_features,
            self.in_features,
            _KINDS[self.dtype],
            _address(self.masks),
            self.values.data_ptr(),
            self.starts.data_ptr(),
            _address(self.scales),
            _address(self.bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs), four vectors at a time.

        Raises:
            ValueError: If x is not of float32 on the CPU, or has another number of inputs.
        """
        if x.dtype != torch.float32 or x.device.type != "cpu" or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x must be float32 on the CPU with {self.in_features} inputs, got {x.dtype} on "
                f"{x.device} with shape {tuple(x.shape)}"
            )
        tokens = x.detach().reshape(-1, self.in_features).contiguous()
        y = torch.empty(len(tokens), self.out_features)
        matrix, threads = self.struct(), torch.get_num_threads()
        for first in range(0, len(tokens), MOST_VECTORS):
            part, out = tokens[first : first + MOST_VECTORS], y[first : first + MOST_VECTORS]
            done = kernels().torchcram_row_product(
                ctypes.byref(matrix), part.data_ptr(), len(part), out.data_ptr(), threads
            )
            if done != 1:
                raise RuntimeError("the matrix does not fit the kernels")
        return y.view(*x.shape[:-1], self.out_features)

    def _apply(self, *_: object, **__: object) -> nn.Module:
        """Leaves the layer unchanged: the kernels work on the CPU, in the type chosen for it."""
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        """Returns the settings of the layer for its `repr`."""
        masked = "masked" if self.masks is not None else "dense"
        return f"{self.in_features}, {self.out_features}, {self.dtype}, {masked}"


class RoundedLinear(nn.Module):
    """A Linear layer that computes what `RowLinear` does, in torch and for any number of tokens.

    Args:
        weight: Weight (outputs, inputs).
        bias: Bias of the outputs, or None.
        dtype: Type that `RowLinear` keeps the values in.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        values, scales = _rounded(weight.detach().to("cpu", torch.float32), dtype)
        values = values.to(dtype).float()
        self.weight = nn.Parameter(
            values if scales is None else values * scales.unsqueeze(1), requires_grad=False
        )
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        self.rounds_inputs = dtype == torch.int8 and rounds_activations()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        if self.rounds_inputs:
            x = _rounded_activations(x)
        return nn.functional.linear(x, self.weight, self.bias)


def rounds_activations() -> bool:
    """Returns whether products with values in 8 bits round activations on this machine.

    Raises:
        RuntimeError: If the kernels have not been built.
    """
    x = torch.zeros(1, _BITS)
    x[0, :2] = torch.tensor([1.0, 1e-3])  # the second rounds to zero
    second = torch.zeros(1, _BITS)
    second[0, 1] = 1
    return float(RowLinear(second, None, torch.int8)(x)) == 0


def _rounded_activations(x: Tensor) -> Tensor:
    """Returns activations in 8 bits, with a scale for every 64, as the kernels round them."""
    inputs = x.shape[-1]
    groups = nn.functional.pad(x, (0, -inputs % _BITS)).unflatten(-1, (-1, _BITS))
    top = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(top == 0, 0, 127 / top)
    rounded: Tensor = (groups * factor).round() * (top / 127)
    return rounded.flatten(-2)[..., :inputs]


def _rounded(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Returns the values of a weight in float32, and the scales of its outputs for int8."""
    if dtype != torch.int8:
        return weight, None
    scales = weight.abs().amax(1) / 127
    return (weight / torch.where(scales == 0, 1, scales).unsqueeze(1)).round_(), scales


def _packed_bits(kept: Tensor) -> Tensor:
    """Returns a mask of 64 bits for every 64 inputs, the first input in the lowest bit."""
    groups = kept.view(len(kept), -1, _BITS).long()
    return (groups << torch.arange(_BITS)).sum(2)  # the highest bit is the sign


def _with_slack(values: Tensor) -> Tensor:
    """Returns the values with zeros behind them that kernels may read."""
    return nn.functional.pad(values, (0, _SLACK // values.itemsize))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
