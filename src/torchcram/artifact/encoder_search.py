"""Search for the smallest encoding that stores a tensor exactly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchcram.artifact.codec import decode, encode
from torchcram.artifact.format import MASK, Encoding, TensorSpec, by_rows
from torchcram.artifact.integers import Quantized, as_integers, find_integers, same_bits
from torchcram.artifact.sparse_layout import most_kept
from torchcram.layers import PLAIN, Layout
from torchcram.operators import NM, Operator, Quantize

GROUPS = (4, 8, 16)  # group sizes of N:M patterns to look for
SIZES = (None, 128, 64, 32)  # numbers of inputs that may share a scale
SLACK = 1.1  # an N:M pattern is preferred to a mask that is up to this factor smaller


@dataclass(frozen=True)
class Hints:
    """Patterns to look for in tensors, those of the operator first.

    Attributes:
        groups: Group sizes of N:M patterns.
        sizes: Numbers of inputs that may share a scale; None for all inputs of an output.
    """

    groups: tuple[int, ...] = GROUPS
    sizes: tuple[int | None, ...] = SIZES

    @classmethod
    def of(cls, operator: Operator | None) -> Hints:
        """Returns the hints of an operator; None and other kinds of operators add nothing."""
        groups, sizes = [], []
        for part in () if operator is None else operator.parts:
            if isinstance(part, NM):
                groups.append(part.group)
            elif isinstance(part, Quantize):
                sizes.append(part.group_size)
        return cls(tuple(dict.fromkeys((*groups, *GROUPS))), tuple(dict.fromkeys((*sizes, *SIZES))))


class _Candidate(NamedTuple):
    """One way to store a tensor.

    Attributes:
        encoding: Encoding of the tensor.
        size: Number of bytes, with the scales.
        used_as: Layout of the tensor, if the encoding depends on it.
        quantized: Integers and scales, if the values are quantized.
    """

    encoding: Encoding
    size: int
    used_as: Layout
    quantized: Quantized | None


def store(
    tensor: Tensor,
    hints: Hints,
    *,
    values: torch.dtype | None = None,
    used_as: Layout | None = None,
) -> tuple[TensorSpec, dict[str, Tensor]]:
    """Encodes a tensor in the fewest bytes from which it can be restored bit for bit.

    Args:
        tensor: Floating-point tensor of one dimension or more, contiguous and on the CPU. In a
            tensor of one dimension only zeros are looked for.
        hints: Patterns and sizes to look for.
        values: Type to round values to, unless they are integers with a scale anyway.
        used_as: Layout of the tensor; if it is unknown, the common layouts are tried.

    Returns:
        Specification of the tensor, and the parts to store.

    Raises:
        ValueError: If values do not fit into the type they are rounded to.
    """
    layouts = _layouts(tensor) if used_as is None else [used_as]
    best = _candidate(tensor, hints, layouts[0], values=values)
    for layout in layouts[1:] if best.quantized is None else []:
        other = _candidate(tensor, hints, layout, values=values)
        if other.quantized is not None and other.size * SLACK < best.size:
            best = other
    if best.quantized is None and best.encoding.values is not None:
        tensor = _rounded(tensor, best.encoding.values)
    spec = TensorSpec(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        encoding=best.encoding,
        transposed=best.used_as.groups if best.used_as.transposed else None,
        stacked=best.used_as.stacked,
    )
    parts = encode(tensor, spec, best.quantized)
    if not bool(same_bits(decode(parts, spec), tensor).all()):
        raise RuntimeError(f"a tensor stored as {best.encoding} is not restored bit for bit")
    return spec, parts


def _layouts(tensor: Tensor) -> list[Layout]:
    """Returns the layouts that quantized weights of unknown layers may have.

    The first is that of Linear and convolution layers. In the others inputs come before outputs, as
    in transposed convolutions, or three dimensions are a stack of matrices.
    """
    if tensor.dim() < 2 or not tensor.numel():
        return [PLAIN]
    stacked = (False, True) if tensor.dim() == 3 and len(tensor) > 1 else (False,)
    return [
        Layout(transposed=transposed, stacked=stack)
        for stack in stacked
        for transposed in (False, True)
    ]


def _candidate(
    tensor: Tensor, hints: Hints, used_as: Layout, *, values: torch.dtype | None
) -> _Candidate:
    """Returns the smallest way to store a tensor with one layout."""
    vector = tensor.dim() == 1
    rows = tensor if vector else by_rows(tensor, used_as).contiguous()
    quantized = None if vector else find_integers(rows, list(hints.sizes))
    if quantized is not None or (values and values.itemsize >= tensor.dtype.itemsize):
        values = None
    if values is not None:
        rows = _rounded(rows, values)
    encoding, size = _smallest(rows, hints, Encoding(values=values))
    if quantized is not None:
        plain = Encoding(bits=quantized.bits, group_size=quantized.group_size)
        integers, smaller = _smallest(rows, hints, plain)
        smaller += quantized.scales.numel() * quantized.scales.itemsize
        if smaller < size:
            return _Candidate(integers, smaller, used_as, quantized)
    return _Candidate(encoding, size, used_as if encoding.by_rows else PLAIN, None)


def _smallest(rows: Tensor, hints: Hints, plain: Encoding) -> tuple[Encoding, int]:
    """Returns the smallest of dense, mask and N:M encodings, and its bytes without scales.

    Args:
        rows: Tensor as (groups, outputs, *kernel positions, inputs), or a vector, which has no N:M
            patterns.
        hints: Patterns to look for.
        plain: Dense encoding, which determines how values are stored.
    """
    kept = as_integers(rows).flatten() != 0
    count, numel = int(kept.count_nonzero()), kept.numel()
    regular = [
        dataclasses.replace(plain, places=(most, group))
        for group in hints.groups
        if numel and rows.dim() > 1 and group <= 256 and rows.shape[-1] % group == 0
        if 0 < (most := most_kept(kept, group)) < group
    ]

    def bytes_of(encoding: Encoding) -> int:
        return encoding.size(numel, count, rows.dtype)

    best = min((plain, dataclasses.replace(plain, places=MASK)), key=bytes_of)
    nearest = min(regular, key=bytes_of, default=plain)
    if bytes_of(nearest) < bytes_of(plain) and bytes_of(nearest) <= SLACK * bytes_of(best):
        best = nearest
    return best, bytes_of(best)


def _rounded(tensor: Tensor, values: torch.dtype) -> Tensor:
    """Returns a tensor rounded to another type, in its own type."""
    rounded = tensor.to(values).to(tensor.dtype)
    if not torch.equal(rounded.isfinite(), tensor.isfinite()):
        raise ValueError(f"it has values that are too large for {values}")
    return rounded
