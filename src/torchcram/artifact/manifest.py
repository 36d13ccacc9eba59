"""What a compact file says of itself."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torchcram.artifact.encoding import DTYPES, TensorSpec, parse_encoding

FORMAT = 1
"""The version of the format that this library writes, and the newest that it reads."""

MOST_DIMENSIONS = 8
"""Number of dimensions that tensors in a file may have."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class Entry(TensorSpec):
    """One tensor of a file.

    Attributes:
        crc32: of the stored bytes; whenever they are read, this is checked.
        sha256: of the stored bytes; `verify` checks this too.
    """

    crc32: int
    sha256: str


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


def digest(text: str) -> str:
    """Returns the checksum of a manifest."""
    return hashlib.sha256(text.encode()).hexdigest()


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
