"""Format of a compact file: its manifest, and the encoding that each tensor is stored in."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from torchcram.artifact.integers import packed_size, wide
from torchcram.artifact.sparse_layout import index_width
from torchcram.kernels.cpu.checksum import checksum
from torchcram.layers import LayerWeights, Layout, reduction_last

MANIFEST, CHECKSUM = "torchcram", "torchcram.sha256"
"""Where the header of a file has the manifest and its checksum."""

FORMAT = 1
"""The version of the format that this library writes, and the newest that it reads."""

MOST_DIMENSIONS = 8
"""Number of dimensions that tensors in a file may have."""

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

MASK = "mask"
_TEXT = re.compile(
    r"(?:dense|(?P<mask>mask)|nm:(?P<keep>\d{1,3}):(?P<group>\d{1,3}))"
    r"(?:\+(?:int(?P<bits>[2-8])(?::g(?P<size>\d{1,18}))?|(?P<values>float32|float16|bfloat16)))?"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """What a file holds.

    Attributes:
        tensors: by name, in the order of the model.
        tied: names that stand for another tensor of the file.
        operator: that the model was compressed by, as text; None where it was not said.
        library: version of this library that wrote the file.
        metadata: whatever the writer added: recipe, metrics, the name of the data set.
        trained: Names of the weights that CrAM trained for compression; empty where not known.
        format: version of the format.
    """

    tensors: Mapping[str, Entry]
    tied: Mapping[str, str] = field(default_factory=dict)
    operator: str | None = None
    library: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    format: int = FORMAT

    def to_json(self) -> str:
        """Writes it as JSON.

        Raises:
            ValueError: if the metadata holds what JSON has no word for.
        """
        tensors = {name: _entry_to_plain(entry) for name, entry in self.tensors.items()}
        plain = {
            "format": self.format,
            "library": self.library,
            "operator": self.operator,
            "tensors": tensors,
            "tied": dict(self.tied),
            "metadata": dict(self.metadata),
        }
        if self.trained:
            plain["trained"] = list(self.trained)
        try:
            text = json.dumps(plain, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"the metadata cannot be written as JSON: {error}") from None
        return text

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Reads what `to_json` wrote, and nothing else.

        Raises:
            ValueError: saying what is wrong.
        """
        try:
            plain = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"its manifest is not JSON: {error}") from None
        version = plain.get("format") if isinstance(plain, dict) else None
        if type(version) is int and version > FORMAT:
            raise ValueError(
                f"it is of format {version}, and this version of torchcram reads up to {FORMAT}"
            )
        if isinstance(plain, dict):
            plain = {"trained": [], **plain}
        _require_keys(plain, "the manifest", _KEYS)
        if version != FORMAT:
            raise ValueError(f"its manifest has format {version!r}, allowed is {FORMAT}")
        tensors = {name: _entry(name, one) for name, one in plain["tensors"].items()}
        for name, other in plain["tied"].items():
            if name in tensors or not isinstance(other, str) or other not in tensors:
                raise ValueError(f"its manifest ties {name!r} to {other!r}, which is no tensor")
        trained = plain["trained"]
        known = tensors.keys() | plain["tied"].keys()
        if not all(isinstance(name, str) and name in known for name in trained):
            raise ValueError("its manifest names trained weights that are no tensors of it")
        return cls(**{**plain, "tensors": tensors, "trained": tuple(trained)})


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


@dataclass(frozen=True, kw_only=True)
class Entry(TensorSpec):
    """One tensor of a file.

    Attributes:
        crc32: of the stored bytes; whenever they are read, this is checked.
        sha256: of the stored bytes; `verify` checks this too.
    """

    crc32: int
    sha256: str


def by_rows(tensor: Tensor, used_as: Layout) -> Tensor:
    """Views a weight as (groups, outputs, *kernel positions, inputs).

    Args:
        tensor: Tensor of two dimensions or more.
        used_as: How its layer uses it.
    """
    return reduction_last(LayerWeights({"": tensor}, {"": used_as}), "")


def layout(transposed: int | None, *, stacked: bool = False) -> Layout:
    """Returns the layout that a specification stands for."""
    return Layout(transposed=transposed is not None, groups=transposed or 1, stacked=stacked)


def digest(text: str) -> str:
    """Returns the checksum of a manifest."""
    return hashlib.sha256(text.encode()).hexdigest()


def crc32(parts: Mapping[str, Tensor]) -> int:
    """Returns the CRC-32 of the bytes of all parts, in the order of their names."""
    return functools.reduce(lambda seen, some: checksum(some, seen), _bytes_of(parts), 0)


def sha256(parts: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of the same bytes."""
    seen = hashlib.sha256()
    for some in _bytes_of(parts):
        seen.update(some.numpy().data)
    return seen.hexdigest()


def _bytes_of(parts: Mapping[str, Tensor]) -> Iterator[Tensor]:
    for name in sorted(parts):
        yield parts[name].contiguous().view(-1).view(torch.uint8)


_KEYS: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "library": (str,),
    "operator": (str, type(None)),
    "tensors": (dict,),
    "tied": (dict,),
    "metadata": (dict,),
    "trained": (list,),
}
_ENTRY_KEYS: dict[str, tuple[type, ...]] = {
    "dtype": (str,),
    "shape": (list,),
    "encoding": (str,),
    "crc32": (int,),
    "sha256": (str,),
    "transposed": (int, type(None)),
    "stacked": (bool,),
}


def _entry_to_plain(entry: Entry) -> dict[str, object]:
    plain: dict[str, object] = {
        "dtype": str(entry.dtype).removeprefix("torch."),
        "shape": list(entry.shape),
        "encoding": str(entry.encoding),
        "crc32": entry.crc32,
        "sha256": entry.sha256,
    }
    if entry.transposed is not None:
        plain["transposed"] = entry.transposed
    return {**plain, "stacked": True} if entry.stacked else plain


def _entry(name: str, plain: object) -> Entry:
    where = f"the entry of {name!r}"
    if isinstance(plain, dict):
        plain = {"transposed": None, "stacked": False, **plain}
    found = _require_keys(plain, where, _ENTRY_KEYS)
    shape, groups = found["shape"], found["transposed"]
    if len(shape) > MOST_DIMENSIONS:  # before anything is computed from them
        raise ValueError(
            f"{where} in its manifest has {len(shape)} dimensions; allowed are up to "
            f"{MOST_DIMENSIONS}"
        )
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"{where} in its manifest has the shape {shape!r:.200}")
    if found["dtype"] not in DTYPES or not _DIGEST.fullmatch(found["sha256"]):
        raise ValueError(f"{where} in its manifest has an unknown dtype or no checksum")
    dtype = DTYPES[found["dtype"]]
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(
            f"{where} in its manifest has the shape {shape!r:.200}, which no memory holds"
        )
    most = 1 if found["stacked"] else (1 << 63) - 1
    if groups is not None and not 1 <= groups <= most:
        raise ValueError(f"{where} in its manifest has {groups!r:.80} groups")
    try:
        encoding = parse_encoding(found["encoding"])
    except ValueError as error:
        raise ValueError(f"{where} in its manifest: {error}") from None
    if not dtype.is_floating_point and (encoding.bits, encoding.values) != (None, None):
        raise ValueError(f"{where} in its manifest stores {found['dtype']} as {encoding}")
    return Entry(
        dtype=dtype,
        shape=tuple(shape),
        encoding=encoding,
        transposed=groups,
        stacked=found["stacked"],
        crc32=found["crc32"],
        sha256=found["sha256"],
    )


def _require_keys(
    plain: object, where: str, keys: Mapping[str, tuple[type, ...]]
) -> dict[str, Any]:
    if not isinstance(plain, dict) or plain.keys() != keys.keys():
        raise ValueError(f"{where} does not have the keys {', '.join(keys)}")
    for key, kinds in keys.items():
        known = isinstance(plain[key], kinds)
        if not known or (isinstance(plain[key], bool) and bool not in kinds):
            raise ValueError(f"{where} has {plain[key]!r:.80} as {key}")
    return plain


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number")
