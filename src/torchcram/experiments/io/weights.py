"""Weight files: safetensors files, written atomically, and compact files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchcram import artifact
from torchcram.artifact.format import MANIFEST
from torchcram.experiments.io.files import write_atomically
from torchcram.messages import list_names

if TYPE_CHECKING:
    from torch import Tensor, nn


def save_model(model: nn.Module, path: Path) -> None:
    """Writes the weights and buffers of a model to a safetensors file, atomically.

    Tied weights are stored once, under their first name. The metadata has the other names, in the
    form of `safetensors.torch.save_model`.
    """
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {}
    names: dict[tuple[object, ...], str] = {}  # first names of tensors, by where they lie
    tied: dict[str, str] = {}
    for name, value in model.state_dict().items():
        location = (value.device, value.data_ptr(), value.dtype, value.shape, value.stride())
        first = names.setdefault(location, name) if value.numel() else name
        if first == name:
            detached = value.detach().cpu()
            tensors[name] = detached.clone(memory_format=torch.contiguous_format)
        else:
            tied[name] = first
    write_atomically(path, save(tensors, {**tied, "format": "pt"}))


def load_model_(model: nn.Module, path: Path) -> None:
    """Loads a file that `save_model` wrote into `model`.

    Raises:
        ValueError: If the file is damaged or holds another model; the message names it.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_file

    try:
        state = load_file(path)
        with safe_open(path, framework="pt") as file:
            names: dict[str, str] = file.metadata() or {}
        expected = model.state_dict().keys()
        tied = {name: state[names[name]] for name in expected if names.get(name) in state}
        state = {**tied, **state}
        lacking = list_names(name for name in expected if name not in state)
        others = list_names(name for name in state if name not in expected)
        if lacking or others:
            raise ValueError(_describe(path, lacking, others))
        model.load_state_dict(state)
    except (SafetensorError, RuntimeError) as error:
        raise ValueError(f"{path} does not hold the expected model: {error}") from error


def _describe(path: Path, lacking: str, others: str) -> str:
    """Returns the message for a file whose names of tensors are not those of a model."""
    parts = [f"it lacks {lacking}"] if lacking else []
    parts += [f"it has others: {others}"] if others else []
    return f"{path} does not hold the expected model: {', and '.join(parts)}"


def load_weights_(model: nn.Module, path: Path) -> None:
    """Loads a weight file into `model`: a compact file, or one that `save_model` wrote.

    Raises:
        ValueError: If the file is damaged or holds another model; the message names it.
        OSError: If there is no such file.
    """
    if _is_compact(path):
        artifact.load(path, model)
    else:
        load_model_(model, path)


def _is_compact(path: Path) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return MANIFEST in (file.metadata() or {})
    except SafetensorError:
        return False  # `load_model_` says what is wrong with it


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns a short digest of the names, dtypes, shapes and values of tensors."""
    hasher = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        hasher.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        hasher.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()[:16]


def state_on_cpu(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of a model with all tensors on the CPU, to send to other ranks."""
    return {name: value.cpu() for name, value in model.state_dict().items()}
