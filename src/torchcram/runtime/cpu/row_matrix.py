"""Matrices for products with one to four vectors: bit masks and the values that are not zero."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchcram.kernels.cpu.library import kernels

MOST_VECTORS = 4
"""Number of vectors that a product takes at most; kMostSequences in packed.h."""

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]  # missing in the types of torch
_BITS = 64  # inputs per mask
_MIDDLE = 8  # is added to integers of 4 bits
_ROWS = 1024  # that are packed in 4 bits at a time
_SLACK = 64  # bytes that the kernels may read beyond the last value
_KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.int8: 2,
    INT4: 3,
}  # 4 if 32 inputs share a scale
_DENSE = {torch.float32: 0.97, torch.bfloat16: 0.94, torch.int8: 0.88, INT4: 0.75}
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
        dtype: Type of the values: torch.float32, torch.bfloat16, torch.int8 with a scale for every
            output, or torch.int4 with a scale for every 64 or 32 inputs of an output. int4 is for
            weights that have at most 4 bits already, and int8 is used for others. With int8 and
            int4, the activations are rounded to 8 bits as well, with a scale for every 64, where
            the machine has instructions for that.

    Attributes:
        dtype: Type of the values.

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
        require_dtype(dtype)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError("a weight is NaN or infinite and cannot be packed")
        self.out_features, self.in_features = weight.shape
        rounded = _rounded(weight, dtype)
        self.dtype, self.kind = rounded.dtype, rounded.kind
        kept = rounded.values != 0
        masked = int(kept.sum()) <= _DENSE[self.dtype] * weight.numel()
        values, sizes = _packed_values(rounded, kept if masked else None)
        self.register_buffer("values", _with_slack(values))
        self.register_buffer("starts", _starts(sizes))
        self.register_buffer("masks", _packed_bits(kept) if masked else None)
        self.register_buffer("scales", rounded.scales)
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
            self.kind,
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
        rounded = _rounded(weight, dtype)
        self.dtype = rounded.dtype
        self.weight = nn.Parameter(
            rounded.weight()[:, : weight.shape[1]].contiguous(), requires_grad=False
        )
        self.bias = None
        if bias is not None:
            self.bias = nn.Parameter(bias.detach().float().clone(), requires_grad=False)
        self.rounds_inputs = not self.dtype.is_floating_point and rounds_activations()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        if self.rounds_inputs:
            x = _rounded_activations(x)
        return nn.functional.linear(x, self.weight, self.bias)


def require_dtype(dtype: torch.dtype) -> None:
    """Checks that values can be kept in a type.

    Raises:
        ValueError: If they cannot.
    """
    if dtype not in _KINDS:
        allowed = ", ".join(map(str, _KINDS))
        raise ValueError(f"dtype must be one of {allowed}, got {dtype!r}")


def has_four_bits(weight: Tensor) -> bool:
    """Returns whether `RowLinear` can keep a weight in torch.int4."""
    return _four_bits(weight) is not None


def cache_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the type of cached keys and values in a decoder with weights of the given type."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


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


class _Rounded(NamedTuple):
    """A weight as it is stored.

    Attributes:
        dtype: Type of the values.
        values: Values in float32, with zeros up to a multiple of 64 inputs.
        scales: Scales of the outputs; None for all but int8.
        block_scales: Scales of 64 or 32 inputs of an output each; None for all but int4.
    """

    dtype: torch.dtype
    values: Tensor
    scales: Tensor | None = None
    block_scales: Tensor | None = None

    @property
    def kind(self) -> int:
        """Number of the type in `Kind` of packed.h."""
        halves = self.block_scales is not None and self.block_scales.numel() > (
            self.values.numel() // _BITS
        )
        return _KINDS[self.dtype] + halves

    def weight(self) -> Tensor:
        """Returns the weight, with zeros up to a multiple of 64 inputs."""
        if self.scales is not None:
            return self.values * self.scales.unsqueeze(1)
        if self.block_scales is not None:
            size = self.values.shape[1] // self.block_scales.shape[1]
            return self.values * self.block_scales.repeat_interleave(size, dim=1)
        return self.values


def _rounded(weight: Tensor, dtype: torch.dtype) -> _Rounded:
    """Returns a weight rounded to a type, or to int8 if int4 is asked for and does not fit."""
    if dtype == INT4 and (four := _four_bits(weight)) is not None:
        return four
    weight = _padded_floats(weight)
    if dtype.is_floating_point:
        return _Rounded(dtype, weight.to(dtype).float())
    scales = weight.abs().amax(1) / 127
    values = (weight / torch.where(scales == 0, 1, scales).unsqueeze(1)).round_()
    return _Rounded(torch.int8, values, scales=scales)


def _padded_floats(weight: Tensor) -> Tensor:
    """Returns a weight in float32 on the CPU, with zeros up to a multiple of 64 inputs."""
    weight = weight.detach().to("cpu", torch.float32)
    return nn.functional.pad(weight, (0, -weight.shape[1] % _BITS))


def _four_bits(weight: Tensor) -> _Rounded | None:
    """Returns a weight as integers of 4 bits times scales; None if it has more bits."""
    floats = _padded_floats(weight)
    for size in (_BITS, _BITS // 2):
        parts = []
        for rows in floats.split(_ROWS):
            part = _integers_and_scales(rows.unflatten(1, (-1, size)), weight.dtype)
            if part is None:
                break
            parts.append(part)
        else:
            values, scales = map(torch.cat, zip(*parts, strict=True))
            return _Rounded(INT4, values.flatten(1), block_scales=scales)
    return None


def _integers_and_scales(blocks: Tensor, given: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """Returns integers from -8 to 7 of the shape of the blocks, and scales; None if there are none.

    The largest integer of a block may be any from 1 to 8: a weight that was quantized with one
    scale per output, say, seldom has a 7 in a block.

    Args:
        blocks: Blocks of a weight along the last dimension, in float32.
        given: Type that the weight has been rounded to before.
    """
    info = torch.finfo(given)
    relative, absolute = 1e-5 + 8 * info.eps, 2 * info.eps * info.smallest_normal
    rows = blocks.flatten(0, -2)
    values, scales, left = torch.empty_like(rows), rows.abs().amax(1), torch.arange(len(rows))
    for largest in (*range(_MIDDLE - 1, 0, -1), _MIDDLE, -_MIDDLE):  # only -8 has 4 bits, 8 has not
        scale = scales[left] / largest
        integers = rows[left] / torch.where(scale == 0, 1, scale).unsqueeze(1)
        near = integers.round().clamp_(-_MIDDLE, _MIDDLE - 1)
        apart = integers.sub_(near).abs_().amax(1) * scale.abs()
        fits = apart <= relative * scale.abs() + absolute
        values[left[fits]], scales[left[fits]] = near[fits], scale[fits]
        left = left[~fits]
        if not len(left):
            return values.view(blocks.shape), scales.view(blocks.shape[:-1])
    return None


def _packed_values(rounded: _Rounded, kept: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns values one after another, and the bytes of every output.

    Args:
        rounded: Weight.
        kept: Values to keep; None for all.
    """
    values, dtype = rounded.values, rounded.dtype
    if rounded.block_scales is None:
        values = values.to(dtype)
        sizes = torch.full((len(values),), values.shape[1]) if kept is None else kept.sum(1)
        return values.flatten() if kept is None else values[kept], sizes * dtype.itemsize
    parts = [tensor.split(_ROWS) for tensor in (values, rounded.block_scales)]
    if kept is None:
        packed = map(_packed_pairs, *parts)
    else:
        packed = map(_packed_halves, *parts, kept.split(_ROWS))
    bits, lengths = zip(*packed, strict=True)
    return torch.cat(bits), torch.cat(lengths)


def _packed_pairs(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and all integers of 4 bits as the kernels read them, and bytes of rows."""
    pairs = (values + _MIDDLE).to(torch.uint8).view(values.numel() // _BITS, -1, 2)
    scales = scales.reshape(len(pairs), -1).view(torch.uint8)
    packed = torch.cat((scales, pairs[..., 0] | pairs[..., 1] << 4), dim=1).view(len(values), -1)
    return packed.flatten(), torch.full((len(values),), packed.shape[1])


def _packed_halves(values: Tensor, scales: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the same for the integers that are kept."""
    counts = kept.unflatten(1, (-1, _BITS)).sum(2)  # of every 64 inputs of an output
    scales = scales.reshape(counts.numel(), -1).view(torch.uint8)
    sizes = scales.shape[1] + (counts + 1) // 2
    starts = _starts(sizes.flatten())
    packed = torch.zeros(int(sizes.sum()), dtype=torch.uint8)
    packed[starts.unsqueeze(1) + torch.arange(scales.shape[1])] = scales
    counts = counts.flatten()
    number = torch.arange(int(counts.sum())) - _starts(counts).repeat_interleave(counts)
    places = (starts + scales.shape[1]).repeat_interleave(counts) + number // 2
    halves = ((values[kept].int() + _MIDDLE) << 4 * (number % 2)).to(torch.uint8)
    return packed.index_add_(0, places, halves), sizes.sum(1)


def _starts(sizes: Tensor) -> Tensor:
    """Returns where parts begin that follow each other."""
    return sizes.cumsum(0) - sizes


def _packed_bits(kept: Tensor) -> Tensor:
    """Returns a mask of 64 bits for every 64 inputs, the first input in the lowest bit."""
    groups = kept.view(len(kept), -1, _BITS).long()
    return (groups << torch.arange(_BITS)).sum(2)  # the highest bit is the sign


def _with_slack(values: Tensor) -> Tensor:
    """Returns the values with zeros behind them that kernels may read."""
    return nn.functional.pad(values, (0, _SLACK // values.itemsize))


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
