"""Reads compact files; every tensor is checked before it is handed out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchcram.artifact.codec import decode, require_decodable, require_parts
from torchcram.artifact.format import CHECKSUM, MANIFEST, Entry, Manifest, crc32, digest, sha256
from torchcram.trained import mark_trained

if TYPE_CHECKING:
    from torch import nn

    Model = TypeVar("Model", bound=nn.Module)

Result = TypeVar("Result")
_UNREADABLE = (SafetensorError, AttributeError, RuntimeError, TypeError, ValueError)
"""Errors of safetensors for types that it or torch does not support."""


class Reader:
    """Open file; its memory map lives as long as this object."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb"):  # raises OSError if it is missing or not readable
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
            raise self._bad("its manifest is altered: the checksum does not match")
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
            raise self._bad(f"its manifest has no entry for {min(others)!r}")
        self.aliases: dict[str, list[str]] = {}
        for name, other in self.manifest.tied.items():
            self.aliases.setdefault(other, []).append(name)

    def each(self, work: Callable[[str], Result]) -> dict[str, Result]:
        """Returns the result of `work` for every tensor, using as many threads as torch."""
        names = list(self.manifest.tensors)
        with ThreadPoolExecutor(max(1, min(torch.get_num_threads(), len(names)))) as threads:
            return dict(zip(names, threads.map(work, names), strict=True))

    def parts(self, name: str, *, thorough: bool = False) -> dict[str, Tensor]:
        """Returns the parts of a tensor as they are in the file, after comparing checksums."""
        entry = self.manifest.tensors[name]
        try:
            parts = {part: self._file.get_tensor(key) for part, key in self._parts[name].items()}
        except _UNREADABLE as error:
            raise self._bad(f"it cannot be read: {error}", name) from None
        if crc32(parts) != entry.crc32 or (thorough and sha256(parts) != entry.sha256):
            raise self._bad("it is altered: the checksum does not match", name)
        return parts

    def decoded(self, name: str, parts: Mapping[str, Tensor], out: Tensor | None = None) -> Tensor:
        """Returns the tensor that parts encode."""
        with self._decoding(name):
            return decode(parts, self.manifest.tensors[name], out)

    def check(self, name: str, parts: Mapping[str, Tensor]) -> None:
        """Raises ValueError for parts that cannot be decoded, without decoding them."""
        with self._decoding(name):
            require_decodable(parts, self.manifest.tensors[name])

    @contextmanager
    def _decoding(self, name: str) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, OverflowError) as error:
            raise self._bad(f"it cannot be decoded: {error}", name) from None

    def empty(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """Returns memory for a tensor, after checking that its parts have the right size."""
        spec = self.manifest.tensors[name]
        with self._decoding(name):
            require_parts(parts, spec)
            return torch.empty(spec.shape, dtype=spec.dtype)

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


def read_manifest(path: str | PathLike[str]) -> Manifest:
    """Returns the manifest of a file, without reading the tensors.

    Raises:
        ValueError: If it is not a compact file, or truncated, or its header was altered.
        OSError: If the file does not exist.
    """
    return Reader(Path(path)).manifest


def stream(path: str | PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields names and tensors, in the order of the model.

    Each tensor is checked before it is yielded, and only one is held in memory. Tied names follow
    one another with the same tensor.

    Raises:
        ValueError: If a tensor is damaged, with the file and the tensor.
    """
    reader = Reader(Path(path))
    for name in reader.manifest.tensors:
        tensor = reader.tensor(name)
        for alias in (name, *reader.aliases.get(name, ())):
            yield alias, tensor


@overload
def load(path: str | PathLike[str], model: None = None) -> dict[str, Tensor]: ...
@overload
def load(path: str | PathLike[str], model: Model) -> Model: ...
def load(path: str | PathLike[str], model: nn.Module | None = None) -> Any:
    """Returns the state dict in a file, or `model` with the state loaded into it.

    Tied names share one tensor in the state dict. All checksums are compared and all tensors are
    checked before the model changes: after an error it is unchanged.

    Args:
        path: Path of the file.
        model: Model with the same names and shapes.

    Raises:
        ValueError: If a tensor is damaged or belongs to another model, with the file and the
            tensor.
    """
    reader = Reader(Path(path))
    tied = reader.manifest.tied
    if model is None:
        parts = reader.each(reader.parts)
        # allocated in this thread: memory that worker threads allocate is not reused
        state = {name: reader.empty(name, parts[name]) for name in parts}
        reader.each(lambda name: reader.decoded(name, parts[name], state[name]))
        return {**state, **{name: state[other] for name, other in tied.items()}}
    _load_into(reader, model)
    if reader.manifest.trained:
        parameters = dict(model.named_parameters())
        names = [name for name in reader.manifest.trained if name in parameters]
        mark_trained(model, {name: parameters[name] for name in names})
    return model


def _load_into(reader: Reader, model: nn.Module) -> None:
    """Loads a file into a model, which stays unchanged if that fails."""
    _require_model(reader, model)
    tied = reader.manifest.tied
    into: dict[str, Tensor] = dict(model.named_buffers(remove_duplicate=False))
    into.update(model.named_parameters(remove_duplicate=False))
    renamed = any(name not in into for name in (*reader.manifest.tensors, *tied))
    if renamed or any(map(_loads_itself, model.modules())):
        state = load(reader.path)
        try:
            with _restored_on_error(model):
                model.load_state_dict(state)
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"{reader.path}: this {type(model).__name__} refuses it: {error}"
            ) from error
        return
    _require_own_memory(reader, into)
    parts = reader.each(reader.parts)
    reader.each(lambda name: reader.check(name, parts[name]))

    @torch.no_grad()
    def copy_(name: str) -> None:
        tensor = reader.decoded(name, parts[name], into[name])
        for alias in reader.aliases.get(name, ()):
            if into[alias] is not into[name]:
                into[alias].copy_(tensor)

    reader.each(copy_)


def verify(path: str | PathLike[str]) -> Manifest:
    """Reads a whole file, compares all checksums and returns its manifest.

    Raises:
        ValueError: If a tensor is damaged, with the file and the tensor.
    """
    reader = Reader(Path(path))
    for name in reader.manifest.tensors:
        reader.tensor(name, thorough=True)
    return reader.manifest


def _loads_itself(module: nn.Module) -> bool:
    """Returns whether a module loads its state by code of its own, which may check it."""
    return not type(module)._load_from_state_dict.__module__.startswith("torch.")


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restores the tensors of a model and their values if a `with` block fails."""
    tensors: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (own, name, tensor, tensor.detach().clone())
        for module in model.modules()
        for own in (module._parameters, module._buffers)
        for name, tensor in own.items()
        if tensor is not None
    ]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for own, name, tensor, value in tensors:
                own[name] = tensor.copy_(value)
        raise


def _require_own_memory(reader: Reader, into: dict[str, Tensor]) -> None:
    """Raises ValueError for a model that ties tensors of the file, or is on the meta device."""
    seen: dict[int, str] = {}
    for name in reader.manifest.tensors:
        if into[name].is_meta:
            raise ValueError(
                f"{reader.path}: {name!r} of the model is on the meta device, without memory; "
                "allowed: model.to_empty(device=...) before"
            )
        other = seen.setdefault(into[name].data_ptr(), name) if into[name].numel() else name
        if other != name:
            raise ValueError(
                f"{reader.path}: {other!r} and {name!r} are two tensors in the file, and one in "
                "this model"
            )


def _require_model(reader: Reader, model: nn.Module) -> None:
    """Raises ValueError unless the model has the names and shapes of the file."""
    manifest = reader.manifest
    shapes = {name: entry.shape for name, entry in manifest.tensors.items()}
    shapes.update((name, shapes[other]) for name, other in manifest.tied.items())
    own = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    for name in sorted(own.keys() | shapes.keys()):
        if own.get(name) != shapes.get(name):
            raise ValueError(
                f"{reader.path} is of another model than this {type(model).__name__}: {name!r} is "
                f"{shapes.get(name, 'missing')} in the file and {own.get(name, 'missing')} here"
            )
