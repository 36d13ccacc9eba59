"""The smallest way to store a tensor exactly."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcram.artifact.decode import decode
from torchcram.artifact.encode import encode
from torchcram.artifact.encoding import MASK, Encoding
from torchcram.artifact.form import Form, by_rows
from torchcram.artifact.integers import as_integers, find_integers, same_bits
from torchcram.artifact.places import most_kept
from torchcram.layers import PLAIN, Layout
from torchcram.operators import NM, Operator, Quantize

GROUPS = (4, 8, 16)  # of N:M patterns that are looked for
SIZES = (None, 128, 64, 32)  # inputs that may share a scale
SLACK = 1.1  # an N:M pattern is worth some bytes more than a mask


@dataclass(frozen=True)
class Hints:
    """What an operator tells of the tensors it has been at; what it does not is looked for.

    Attributes:
        groups: of N:M patterns.
        sizes: how many inputs may share a scale.
    """

    groups: tuple[int, ...] = GROUPS
    sizes: tuple[int | None, ...] = SIZES

    @classmethod
    def of(cls, operator: Operator | None) -> Hints:
        """Reads them off an operator; None and operators of other kinds tell nothing."""
        groups, sizes = [], []
        for part in () if operator is None else operator.parts:
            if isinstance(part, NM):
                groups.append(part.group)
            elif isinstance(part, Quantize):
                sizes.append(part.group_size)
        return cls(tuple(dict.fromkeys((*groups, *GROUPS))), tuple(dict.fromkeys((*sizes, *SIZES))))


def store(
    tensor: Tensor,
    hints: Hints,
    *,
    values: torch.dtype | None = None,
    used_as: Layout = PLAIN,
) -> tuple[Form, dict[str, Tensor]]:
    """Stores a compressed weight in as few bytes as give it back bit for bit.

    Args:
        tensor: of floating point, at least two dimensions, contiguous and on the CPU.
        hints: what to look for.
        values: round values to this type, unless they are integers with a scale anyway.
        used_as: How its layer uses it.

    Returns:
        What it is stored as, and the parts that are stored.

    Raises:
        ValueError: if values do not fit into the type they are to be rounded to.
    """
    rows = by_rows(tensor, used_as).contiguous()
    quantized = find_integers(rows, list(hints.sizes))
    if quantized is not None or (values and values.itemsize >= tensor.dtype.itemsize):
        values = None
    if values is not None:
        tensor = _rounded(tensor, values)
        rows = by_rows(tensor, used_as)
    encoding, size = _smallest(rows, hints, Encoding(values=values))
    if quantized is not None:
        plain = Encoding(bits=quantized.bits, group_size=quantized.group_size)
        integers, smaller = _smallest(rows, hints, plain)
        smaller += quantized.scales.numel() * quantized.scales.itemsize
        encoding = integers if smaller < size else encoding
    if not encoding.by_rows and encoding.bits is None:
        used_as = PLAIN
    form = Form(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        encoding=encoding,
        transposed=used_as.groups if used_as.transposed else None,
        stacked=used_as.stacked,
    )
    parts = encode(tensor, form, quantized)
    if not bool(same_bits(decode(parts, form), tensor).all()):
        raise RuntimeError(f"a tensor stored as {encoding} does not come back as it was")
    return form, parts


def _smallest(rows: Tensor, hints: Hints, plain: Encoding) -> tuple[Encoding, int]:
    """Returns which places to store, and the bytes it takes without scales.

    Args:
        rows: (groups, outputs, *kernel positions, inputs).
        hints: what to look for.
        plain: what all values are stored as.
    """
    kept = as_integers(rows).flatten() != 0
    count, numel = int(kept.count_nonzero()), kept.numel()
    regular = [
        dataclasses.replace(plain, places=(most, group))
        for group in hints.groups
        if numel and group <= 256 and rows.shape[-1] % group == 0
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
    rounded = tensor.to(values).to(tensor.dtype)
    if not torch.equal(rounded.isfinite(), tensor.isfinite()):
        raise ValueError(f"it has values that are too large for {values}")
    return rounded
