"""Compact files, read: every tensor is checked before it is handed out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import Tensor

from torchcram.artifact.reader import Reader
from torchcram.trained import mark_trained

if TYPE_CHECKING:
    from torch import nn

    from torchcram.artifact.manifest import Manifest

    Model = TypeVar("Model", bound=nn.Module)


def read_manifest(path: str | PathLike[str]) -> Manifest:
    """Returns what a file says of itself; the tensors are not read.

    Raises:
        ValueError: naming the file, if it is no compact file, or cut off, or its header altered.
        OSError: if there is no such file.
    """
    return Reader(Path(path)).manifest


def stream(path: str | PathLike[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields name and tensor one after another, in the order of the model.

    Each is checked before it is yielded, and no more than one is in memory here. Names that are
    tied come one after another with the same tensor.

    Raises:
        ValueError: naming the file and the tensor, if something is wrong with it.
    """
    reader = Reader(Path(path))
    for name in reader.manifest.tensors:
        tensor = reader.tensor(name)
        for one in (name, *reader.aliases.get(name, ())):
            yield one, tensor


@overload
def load(path: str | PathLike[str], model: None = None) -> dict[str, Tensor]: ...
@overload
def load(path: str | PathLike[str], model: Model) -> Model: ...
def load(path: str | PathLike[str], model: nn.Module | None = None) -> Any:
    """Returns the state dict in a file, or `model` with the state loaded into it.

    Tensors that are tied are one in the state dict. All checksums are compared, and all that can be
    wrong with a tensor is looked at, before the model changes: after an error it is as it was.

    Args:
        path: Path of the file.
        model: Model with the same names and shapes.

    Raises:
        ValueError: naming the file and the tensor, if something is wrong with it or it is of
            another model.
    """
    reader = Reader(Path(path))
    tied = reader.manifest.tied
    if model is None:
        parts = reader.each(reader.parts)
        # allocated here: threads of their own would get memory that is never used again
        found = {name: reader.empty(name, parts[name]) for name in parts}
        reader.each(lambda name: reader.decoded(name, parts[name], found[name]))
        return {**found, **{name: found[other] for name, other in tied.items()}}
    _load_into(reader, model)
    if reader.manifest.trained:
        parameters = dict(model.named_parameters())
        names = [name for name in reader.manifest.trained if name in parameters]
        mark_trained(model, {name: parameters[name] for name in names})
    return model


def _load_into(reader: Reader, model: nn.Module) -> None:
    """Loads a file into a model, which stays as it was if that fails."""
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
    """Reads all of a file, compares all checksums and returns its manifest.

    Raises:
        ValueError: naming the file and the tensor, if something is wrong with it.
    """
    reader = Reader(Path(path))
    for name in reader.manifest.tensors:
        reader.tensor(name, thorough=True)
    return reader.manifest


def _loads_itself(module: nn.Module) -> bool:
    """Whether a module has its own way to take its state, which may check it."""
    return not type(module)._load_from_state_dict.__module__.startswith("torch.")


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    """Gives a model its tensors and their values back if a `with` block fails."""
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
    """Refuses a model that has one tensor for several of the file, and one without memory."""
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
