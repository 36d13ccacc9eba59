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

    Tied weights are stored once, under their first name.
    """
    from safetensors.torch import save

    tied = _tied_names(model)
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in model.state_dict().items()
        if name not in tied
    }
    # with more metadata the bytes would differ from file to file: safetensors does not sort it
    write_atomically(path, save(tensors, {"format": "pt"}))


def load_model_(model: nn.Module, path: Path) -> None:
    """Loads a file that `save_model` wrote into `model`.

    Raises:
        ValueError: If the file is damaged or holds another model; the message names it.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        state = load_file(path)
        for name, first in _tied_names(model).items():
            if first in state:
                state.setdefault(name, state[first])
        expected = model.state_dict().keys()
        lacking = list_names(name for name in expected if name not in state)
        others = list_names(name for name in state if name not in expected)
        if lacking or others:
            raise ValueError(_describe(path, lacking, others))
        model.load_state_dict(state)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    except RuntimeError as error:
        raise ValueError(f"{path} does not hold the expected model: {error}") from error


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Returns the first name of every tensor that has several, by its other names."""
    names: dict[int, str] = {}
    state = model.state_dict(keep_vars=True)
    firsts = {name: names.setdefault(id(value), name) for name, value in state.items()}
    return {name: first for name, first in firsts.items() if name != first}


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
