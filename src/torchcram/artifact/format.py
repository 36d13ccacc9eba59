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
from torchcram.kernels.cpu.decode import checksum
from torchcram.layers import LayerWeights, Layout, reduction_last

MANIFEST, CHECKSUM = "torchcram", "torchcram.sha256"
"""Keys of the manifest and of its checksum in the header of a file."""

FORMAT = 1
"""Version of the format that this library writes, and the newest that it reads."""

MOST_DIMENSIONS = 8
"""Largest number of dimensions that tensors in a file may have."""

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.bool),
        *(torch.uint64, torch.uint32, torch.uint16, torch.uint8),
    )
}
"""Types that tensors in a file may have, by name."""

MASK = "mask"
_TEXT = re.compile(
    r"(?:dense|(?P<mask>mask)|nm:(?P<keep>\d{1,3}):(?P<group>\d{1,3}))"
    r"(?:\+(?:int(?P<bits>[2-8])(?::g(?P<size>\d{1,18}))?|(?P<values>float32|float16|bfloat16)))?"
)
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Manifest:
    """Contents of a file.

    Attributes:
        tensors: Entries of the tensors by name, in the order of the model.
        tied: Names of tied tensors, each with the name of the tensor it is stored as.
        operator: Text of the operator that compressed the model; None if it was not given.
        library: Version of this library that wrote the file.
        metadata: Metadata that the writer added, such as recipe, metrics and dataset.
        trained: Names of the weights that CrAM trained for compression; empty if unknown.
        format: Version of the format.
    """

    tensors: Mapping[str, Entry]
    tied: Mapping[str, str] = field(default_factory=dict)
    operator: str | None = None
    library: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    format: int = FORMAT

    def to_json(self) -> str:
        """Returns the manifest as JSON.

        Raises:
            ValueError: If the metadata cannot be represented in JSON.
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
        """Reads a manifest that `to_json` wrote, and nothing else.

        Raises:
            ValueError: If it is anything else, with the reason.
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
        tensors = {name: _entry(name, entry) for name, entry in plain["tensors"].items()}
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
    """Encoding of one tensor; the manifest contains its text.

    "dense" stores every value, "mask" a bit per value and the values that are not zero, "nm:2:4"
    two values out of every four along the reduction dimension and their positions. A suffix after
    "+" says how values are stored: "float16" rounded to that type, "int4" as integers with a scale
    per output channel, "int4:g64" with a scale per 64 inputs.

    Attributes:
        places: Positions that are stored: None for all, "mask", or (keep, group).
        bits: Number of bits of an integer, if values are stored as integers.
        group_size: Number of inputs that share a scale; None for all inputs of an output channel.
        values: Type that other values were rounded to; None for the type of the tensor.
    """

    places: str | tuple[int, int] | None = None
    bits: int | None = None
    group_size: int | None = None
    values: torch.dtype | None = None

    @property
    def by_rows(self) -> bool:
        """Whether values are ordered by the reduction dimension, rather than as in memory."""
        return self.group_size is not None or isinstance(self.places, tuple)

    def keys(self, name: str) -> dict[str, str]:
        """Returns the names of the parts of a tensor in a file; a dense tensor keeps its name."""
        parts = ["values"] if self.bits is None else ["integers", "scales"]
        if self.places is not None:
            parts.insert(0, "mask" if self.places == MASK else "indices")
        return {part: name if parts == ["values"] else f"{name}:{part}" for part in parts}

    def size(self, numel: int, kept: int, dtype: torch.dtype) -> int:
        """Returns the number of bytes that positions and values take, without scales.

        Args:
            numel: Number of values in the tensor.
            kept: Number of values that are not zero.
            dtype: Type of the tensor.
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
        """N:M pattern as (keep, group)."""
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
    match = _TEXT.fullmatch(text)
    if match is None:
        raise ValueError(
            f"{text[:80]!r} is no encoding, such as dense, mask+float16 or nm:2:4+int4"
        )
    places: str | tuple[int, int] | None = match["mask"]
    if match["keep"] is not None:
        places = int(match["keep"]), int(match["group"])
        if not 1 <= places[0] <= places[1] <= 256:
            raise ValueError(f"{text!r} keeps {places[0]} of every {places[1]}")
    if match["size"] is not None and int(match["size"]) < 1:
        raise ValueError(f"{text!r} has groups of size 0")
    return Encoding(
        places,
        bits=None if match["bits"] is None else int(match["bits"]),
        group_size=None if match["size"] is None else int(match["size"]),
        values=None if match["values"] is None else DTYPES[match["values"]],
    )


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """Specification of a stored tensor: everything that is needed to read its parts.

    Attributes:
        dtype: Type of the tensor.
        shape: Shape of the tensor.
        encoding: Encoding of the tensor.
        transposed: Number of groups of a transposed convolution, if the encoding depends on which
            dimensions are inputs and outputs; 1 for other weights with inputs before outputs.
        stacked: Whether dimension 0 counts fused experts, if the encoding depends on it.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: Encoding
    transposed: int | None = None
    stacked: bool = False

    @property
    def numel(self) -> int:
        """Number of values in the tensor."""
        return math.prod(self.shape)

    @property
    def computed_in(self) -> torch.dtype:
        """Type in which values are multiplied by scales; without scales the type of the tensor."""
        return self.dtype if self.encoding.bits is None else wide(self.dtype)

    @property
    def in_order(self) -> bool:
        """Whether values are stored in the order in which they are in memory."""
        linear = len(self.shape) == 2 + self.stacked and self.transposed is None
        return linear or not self.encoding.by_rows

    @property
    def rows(self) -> tuple[int, ...]:
        """Shape as (groups, outputs, *kernel positions, inputs)."""
        return tuple(self.to_rows(torch.empty(self.shape, device="meta")).shape)

    def to_rows(self, tensor: Tensor) -> Tensor:
        """Views a tensor of this specification as its `rows`."""
        return by_rows(tensor, layout(self.transposed, stacked=self.stacked))

    def from_rows(self, flat: Tensor) -> Tensor:
        """Returns values that are ordered by rows as a tensor of this specification."""
        inputs = 2 if self.transposed is None else 1
        return flat.view(self.rows).movedim(-1, inputs).reshape(self.shape).contiguous()


@dataclass(frozen=True, kw_only=True)
class Entry(TensorSpec):
    """Entry of one tensor in the manifest.

    Attributes:
        crc32: Checksum of the stored bytes, compared whenever they are read.
        sha256: SHA-256 of the stored bytes, which `verify` compares too.
    """

    crc32: int
    sha256: str


def by_rows(tensor: Tensor, used_as: Layout) -> Tensor:
    """Views a weight as (groups, outputs, *kernel positions, inputs).

    Args:
        tensor: Tensor of two dimensions or more.
        used_as: Layout of the tensor.
    """
    return reduction_last(LayerWeights({"": tensor}, {"": used_as}), "")


def layout(transposed: int | None, *, stacked: bool = False) -> Layout:
    """Returns the layout of a specification."""
    return Layout(transposed=transposed is not None, groups=transposed or 1, stacked=stacked)


def digest(text: str) -> str:
    """Returns the checksum of a manifest."""
    return hashlib.sha256(text.encode()).hexdigest()


def crc32(parts: Mapping[str, Tensor]) -> int:
    """Returns the CRC-32 of the bytes of all parts, in the order of their names."""
    return functools.reduce(lambda crc, part: checksum(part, crc), _bytes_of(parts), 0)


def sha256(parts: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 of the bytes of all parts, in the order of their names."""
    digest = hashlib.sha256()
    for part in _bytes_of(parts):
        digest.update(part.numpy().data)
    return digest.hexdigest()


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
    fields = _require_keys(plain, where, _ENTRY_KEYS)
    shape, groups = fields["shape"], fields["transposed"]
    if len(shape) > MOST_DIMENSIONS:  # before anything is computed from the shape
        raise ValueError(
            f"{where} in its manifest has {len(shape)} dimensions; allowed are up to "
            f"{MOST_DIMENSIONS}"
        )
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in shape):
        raise ValueError(f"{where} in its manifest has the shape {shape!r:.200}")
    if fields["dtype"] not in DTYPES or not _DIGEST.fullmatch(fields["sha256"]):
        raise ValueError(f"{where} in its manifest has an unknown dtype or no checksum")
    dtype = DTYPES[fields["dtype"]]
    if math.prod(shape) * dtype.itemsize >= 1 << 63:
        raise ValueError(
            f"{where} in its manifest has the shape {shape!r:.200}, too large for any memory"
        )
    most = 1 if fields["stacked"] else (1 << 63) - 1
    if groups is not None and not 1 <= groups <= most:
        raise ValueError(f"{where} in its manifest has {groups!r:.80} groups")
    try:
        encoding = parse_encoding(fields["encoding"])
    except ValueError as error:
        raise ValueError(f"{where} in its manifest: {error}") from None
    if not dtype.is_floating_point and (encoding.bits, encoding.values) != (None, None):
        raise ValueError(f"{where} in its manifest stores {fields['dtype']} as {encoding}")
    return Entry(
        dtype=dtype,
        shape=tuple(shape),
        encoding=encoding,
        transposed=groups,
        stacked=fields["stacked"],
        crc32=fields["crc32"],
        sha256=fields["sha256"],
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
