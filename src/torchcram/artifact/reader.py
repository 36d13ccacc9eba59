"""An open compact file, whose parts are checked when they are read."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchcram.artifact.decode import decode, require_decodable, require_parts
from torchcram.artifact.manifest import Entry, Manifest, digest
from torchcram.kernels.cpu.checksum import checksum

Result = TypeVar("Result")
MANIFEST, CHECKSUM = "torchcram", "torchcram.sha256"
"""Where the header of a file has the manifest and its checksum."""

_UNREADABLE = (SafetensorError, AttributeError, RuntimeError, TypeError, ValueError)
"""Errors of safetensors for types that it, or torch, does not know."""


class Reader:
    """An open file; the memory it is mapped to goes when it does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb"):  # an error of the system where there is none, or no right to it
            pass
        try:
            self._file = cast(Any, safe_open(path, framework="pt"))
            self._keys = set(self._file.keys())
            header: Mapping[str, str] = self._file.metadata() or {}
        except (SafetensorError, OSError, ValueError) as error:
            raise self._bad(f"it is cut off, altered or no safetensors file: {error}") from None
        if MANIFEST not in header:
            raise self._bad("it is no compact file of torchcram: its header has no manifest")
        if digest(header[MANIFEST]) != header.get(CHECKSUM):
            raise self._bad("its manifest is altered: the checksum is another one")
        try:
            self.manifest = Manifest.from_json(header[MANIFEST])
        except (ValueError, RecursionError) as error:
            raise self._bad(str(error)) from None
        entries = self.manifest.tensors.items()
        self._parts = {name: self._keys_of(name, entry) for name, entry in entries}
        known = [key for keys in self._parts.values() for key in keys.values()]
        if len(set(known)) != len(known):
            raise self._bad("its manifest gives one part to two tensors")
        if others := self._keys.difference(known):
            raise self._bad(f"its manifest does not know {min(others)!r}")
        self.aliases: dict[str, list[str]] = {}
        for name, other in self.manifest.tied.items():
            self.aliases.setdefault(other, []).append(name)

    def each(self, work: Callable[[str], Result]) -> dict[str, Result]:
        """Returns what work comes to for every tensor, done in as many threads as torch has."""
        names = list(self.manifest.tensors)
        with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), len(names)))) as threads:
            return dict(zip(names, threads.map(work, names), strict=True))

    def parts(self, name: str, *, thorough: bool = False) -> dict[str, Tensor]:
        """Returns the parts of a tensor as they are in the file, the checksums compared."""
        entry = self.manifest.tensors[name]
        try:
            parts = {part: self._file.get_tensor(key) for part, key in self._parts[name].items()}
        except _UNREADABLE as error:
            raise self._bad(f"it cannot be read: {error}", name) from None
        if crc32(parts) != entry.crc32 or (thorough and sha256(parts) != entry.sha256):
            raise self._bad("altered: its checksum is another one", name)
        return parts

    def decoded(self, name: str, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Returns what parts stand for."""
        with self._decoding(name):
            return decode(parts, self.manifest.tensors[name], out)

    def check(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Refuses parts that cannot be decoded, without decoding them."""
        with self._decoding(name):
            require_decodable(parts, self.manifest.tensors[name])

    @contextmanager
    def _decoding(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, OverflowError) as error:
            raise self._bad(f"it cannot be decoded: {error}", name) from None

    def empty(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns memory for a tensor, once it is clear that its parts are of such a size."""
        form = self.manifest.tensors[name]
        with self._decoding(name):
            require_parts(parts, form)
            return torch.empty(form.shape, dtype=form.dtype)

    def tensor(self, name: str, *, thorough: bool = False) -> Tensor:
        """Returns a tensor of the file, checked."""
        return self.decoded(name, self.parts(name, thorough=thorough))

    def _keys_of(self, name: str, entry: Entry) -> dict[str, str]:
        keys = entry.encoding.keys(name)
        for key in keys.values():
            if key not in self._keys:
                raise self._bad(f"{key!r} is missing", name)
        return keys

    def _bad(self, problem: str, name: str | None = None) -> ValueError:
        tensor = "" if name is None else f"tensor {name!r}: "
        return ValueError(f"{self.path}: {tensor}{problem}")


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
