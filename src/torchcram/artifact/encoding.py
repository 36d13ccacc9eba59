"""How a tensor is stored: the encoding, the tensor it is of, and the parts that are written."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from torchcram.artifact.bits import pack, packed_size
from torchcram.artifact.integers import Quantized, as_integers, wide
from torchcram.artifact.sparse_layout import fill_up, index_width, write_indices, write_mask
from torchcram.layers import LayerWeights, Layout, reduction_last

MASK = "mask"
_TEXT = re.compile(
    r"(?:dense|(?P<mask>mask)|nm:(?P<keep>\d{1,3}):(?P<group>\d{1,3}))"
    r"(?:\+(?:int(?P<bits>[2-8])(?::g(?P<size>\d{1,18}))?|(?P<values>float32|float16|bfloat16)))?"
)
DTYPES = {
    str(one).removeprefix("torch."): one
    for one in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}
"""The types that tensors in a file may have, by name."""


@dataclass(frozen=True)
class Encoding:
    """The way one tensor is stored; its text is what the manifest says of it.

    "dense" stores every value, "mask" a bit per place and the values that are not zero, "nm:2:4"
    two values out of every four along the reduction dimension and where they were. After a "+"
    comes what is stored in their place: "float16" for values that were rounded to it, "int4" for
    integers and a scale per output channel, "int4:g64" for a scale per 64 inputs.

    Attributes:
        places: None for all, "mask", or (keep, group).
        bits: of integers, where the values are such.
        group_size: how many inputs share a scale; None for all of an output channel.
        values: what values that are no integers were rounded to; None for their own type.
    """

    places: str | tuple[int, int] | None = None
    bits: int | None = None
    group_size: int | None = None
    values: torch.dtype | None = None

    @property
    def by_rows(self) -> bool:
        """Whether values are in the order of the reduction dimension, or as they lie in memory."""
        return self.group_size is not None or isinstance(self.places, tuple)

    def keys(self, name: str) -> dict[str, str]:
        """Returns what the parts of a tensor are called in a file; a dense one keeps its name."""
        parts = ["values"] if self.bits is None else ["integers", "scales"]
        if self.places is not None:
            parts.insert(0, "mask" if self.places == MASK else "indices")
        return {part: name if parts == ["values"] else f"{name}:{part}" for part in parts}

    def size(self, numel: int, kept: int, dtype: torch.dtype) -> int:
        """Returns the bytes that places and values take; scales come on top.

        Args:
            numel: how many values the tensor has.
            kept: how many are not zero.
            dtype: of the tensor.
        """
        width = self.bits or 8 * (self.values or dtype).itemsize
        if self.places is None:
            return packed_size(numel, width)
        if self.places == MASK:
            return packed_size(numel, 1) + packed_size(kept, width)
        keep, group = self.pattern
        stored = numel // group * keep
        return packed_size(stored, index_width(group)) + packed_size(stored, width)

    @property
    def pattern(self) -> tuple[int, int]:
        """The (keep, group) of an N:M pattern."""
        if not isinstance(self.places, tuple):
            raise ValueError(f"{self} has no N:M pattern")
        return self.places

    def __str__(self) -> str:
        places = "dense" if self.places is None else self.places
        if isinstance(places, tuple):
            places = f"nm:{places[0]}:{places[1]}"
        if self.bits is not None:
            size = "" if self.group_size is None else f":g{self.group_size}"
            return f"{places}+int{self.bits}{size}"
        return places if self.values is None else f"{places}+{str(self.values)[6:]}"


def parse_encoding(text: str) -> Encoding:
    """Reads an encoding from its text; the inverse of `str(encoding)`."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no encoding, as dense, mask+float16 or nm:2:4+int4")
    places: str | tuple[int, int] | None = found["mask"]
    if found["keep"] is not None:
        places = int(found["keep"]), int(found["group"])
        if not 1 <= places[0] <= places[1] <= 256:
            raise ValueError(f"{text!r} keeps {places[0]} of every {places[1]}")
    if found["size"] is not None and int(found["size"]) < 1:
        raise ValueError(f"{text!r} has groups of nothing")
    return Encoding(
        places,
        bits=None if found["bits"] is None else int(found["bits"]),
        group_size=None if found["size"] is None else int(found["size"]),
        values=None if found["values"] is None else DTYPES[found["values"]],
    )


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Specification of a stored tensor: all that is needed to read its parts.

    Attributes:
        dtype: Type of the tensor.
        shape: Shape of the tensor.
        encoding: Encoding it is stored in.
        transposed: Number of groups of a transposed convolution, where the encoding depends on what
            its inputs and outputs are; 1 for other weights with their inputs before their outputs.
        stacked: Whether dimension 0 is that of fused experts, where the encoding depends on it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: Encoding
    transposed: int | None = None
    stacked: bool = False

    @property
    def numel(self) -> int:
        """How many values the tensor has."""
        return math.prod(self.shape)

    @property
    def computed_in(self) -> torch.dtype:
        """The type in which scales are multiplied; without scales that of the tensor."""
        return self.dtype if self.encoding.bits is None else wide(self.dtype)

    @property
    def in_order(self) -> bool:
        """Whether values are stored in the order in which they lie in memory."""
        linear = len(self.shape) == 2 + self.stacked and self.transposed is None
        return linear or not self.encoding.by_rows

    @property
    def rows(self) -> tuple[int, ...]:
        """(groups, outputs, *kernel positions, inputs)."""
        return tuple(self.to_rows(torch.empty(self.shape, device="meta")).shape)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Views a tensor of this specification as its `rows`."""
        return by_rows(tensor, layout(self.transposed, stacked=self.stacked))

    def from_rows(self, flat: Tensor) -> Tensor:
        """Returns values in the order of the rows as a tensor of this specification."""
        inputs = 2 if self.transposed is None else 1
        return flat.view(self.rows).movedim(-1, inputs).reshape(self.shape).contiguous()


def layout(transposed: int | None, *, stacked: bool = False) -> Layout:
    """Returns the layout that a specification stands for."""
    return Layout(transposed=transposed is not None, groups=transposed or 1, stacked=stacked)


def by_rows(tensor: Tensor, used_as: Layout) -> Tensor:
    """Views a weight as (groups, outputs, *kernel positions, inputs).

    Args:
        tensor: Tensor of two dimensions or more.
        used_as: How its layer uses it.
    """
    return reduction_last(LayerWeights({"": tensor}, {"": used_as}), "")


def encode(
    tensor: Tensor, spec: TensorSpec, quantized: Quantized | None = None
) -> dict[str, Tensor]:
    """Returns the parts that `decode` makes the tensor from.

    Args:
        tensor: Tensor to store, contiguous and on the CPU.
        spec: Specification of the tensor, with the encoding it is stored in.
        quantized: Integers and scales, for an encoding with bits.
    """
    encoding = spec.encoding
    flat = (spec.to_rows(tensor) if encoding.by_rows else tensor).reshape(-1)
    stored: dict[str, Tensor] = {}
    kept = None
    if encoding.places is not None:
        kept = as_integers(flat) != 0  # -0.0 is no zero
        if encoding.places == MASK:
            stored["mask"] = write_mask(kept)
        else:
            kept = fill_up(kept, *encoding.pattern)
            stored["indices"] = write_indices(kept, encoding.pattern[1])
    if encoding.bits is None or quantized is None:
        values = tensor if kept is None else flat[kept]
        return {**stored, "values": values.to(encoding.values or tensor.dtype)}
    codes = quantized.codes
    if not encoding.by_rows:
        codes = spec.from_rows(codes).view(-1)
    codes = codes if kept is None else codes[kept]
    codes = codes.view(torch.uint8).bitwise_and((1 << encoding.bits) - 1)
    return {**stored, "integers": pack(codes, encoding.bits), "scales": quantized.scales}
